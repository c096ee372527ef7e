# SPDX-License-Identifier: Apache-2.0
"""A model with the methods of TransformerLens that need no code in the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NoReturn, Self

import torch

from vllm_steer import Edit, site
from vllm_steer.adapters import shown
from vllm_steer.errors import SteeringError
from vllm_steer.peers.engines import Engine, hooks_of, rows_of
from vllm_steer.peers.refusals import (
    ARGUMENT,
    GENERATING,
    LOADING,
    MODEL,
    REFUSALS,
    refuse_attribute,
    refuse_names,
)
from vllm_steer.peers.transformer_lens.cache import HOOKS, ActivationCache, hook_name
from vllm_steer.peers.transformer_lens.hooks import on_prompts

_REFUSED = REFUSALS["transformer-lens"]


class HookedTransformer(Engine):
    """A model that runs on an offline engine.

    Examples:
        >>> from vllm_steer.peers.transformer_lens import HookedTransformer  # doctest: +SKIP
        >>> model = HookedTransformer("demo/model")  # doctest: +SKIP
        >>> _, cache = model.run_with_cache("one", names_filter="blocks.1.hook_resid_post")  # doctest: +SKIP
        >>> cache["resid_post", 1].shape  # doctest: +SKIP
    """

    def __init__(self, model: Any, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self.cfg = SimpleNamespace(n_layers=self.num_layers, d_model=self.hidden_size, d_vocab=self.vocab_size)
        self.hook_names: tuple[str, ...] = tuple(
            hook_name(point, layer)
            for layer in range(self.num_layers)
            for point in HOOKS
            if self.points[point]["on"] and layer not in self.points[point]["unread"]
        )
        """Names of the hooks whose rows the engine returns."""

    @classmethod
    def from_pretrained(cls, model_name: Any, **kwargs: Any) -> Self:
        """Start an engine, as the class itself does.

        Args:
            model_name: Name or folder of a model, or a ``vllm_steer.LLM`` with steering enabled.
            **kwargs: Arguments of ``vllm_steer.LLM``, and ``device`` if vLLM runs on it.

        Raises:
            SteeringError: An argument of TransformerLens is not supported.
        """
        # Arguments that are false ask for nothing.
        refuse_names((name for name, value in kwargs.items() if value), _REFUSED[LOADING])
        kept = {name: value for name, value in kwargs.items() if name not in _REFUSED[LOADING]}
        device, accelerator = kept.pop("device", None), torch.accelerator.current_accelerator()
        own = "cpu" if accelerator is None else accelerator.type
        if device is not None and str(device).partition(":")[0] != own:
            raise SteeringError("device", f"vLLM runs on {own}; omit it")
        return cls(model_name, **kept)

    boot_transformers = from_pretrained

    def to_tokens(self, text: Any, **unsupported: Any) -> torch.Tensor:
        """Return tokens ``[batch, tokens]`` of a text or of texts with equally many tokens; refuse other arguments."""
        refuse(unsupported)
        return torch.tensor(self._encode(text))

    def run_with_cache(
        self,
        prompts: Any,
        *,
        names_filter: Any = None,
        return_type: str | None = "logits",
        remove_batch_dim: bool = False,
        edits: Sequence[Edit] = (),
        **unsupported: Any,
    ) -> tuple[torch.Tensor | None, ActivationCache]:
        """Forward prompts and return rows by name of the hook.

        Args:
            prompts: A text, texts or tokens ``[batch, tokens]``, with equally many tokens each.
            names_filter: A name, names, or a function of names; all hooks that the engine serves by default. Names of
                other libraries are accepted.
            return_type: ``"logits"`` for the log-probabilities at the last token, ``[batch, 1, vocab]``; None for none.
            remove_batch_dim: Whether the rows of one prompt have no first dimension.
            edits: Edits that apply during the run.
            **unsupported: Other arguments of TransformerLens, which are refused.

        Returns:
            The log-probabilities and the cache.

        Raises:
            SteeringError: An argument is invalid.
            RuntimeError: Rows are missing.
        """
        refuse(unsupported)
        tokens, hooks = self._encode(prompts), self._read_filter(names_filter)
        outputs = self._run(tokens, return_type, edits, {"hooks": hooks, "positions": "all_prompt"})
        found = [rows_of(output, f"prompts[{i}]") for i, output in enumerate(outputs)]
        wanted = {hook_name(point, layer): (point, layer) for point in hooks for layer in hooks[point]}
        rows = {
            name: torch.stack([result.tensor(*wanted[name]) for result in found])
            for name in self.hook_names
            if name in wanted
        }
        cache = ActivationCache(rows, self.cfg.n_layers)
        return self._logits(outputs) if return_type else None, cache.remove_batch_dim() if remove_batch_dim else cache

    def run_with_edits(self, prompts: Any, edits: Sequence[Edit]) -> torch.Tensor:
        """Return the log-probabilities at the last token under edits, ``[batch, 1, vocab]``.

        Edits take the place of the functions of ``run_with_hooks``. Their ``point`` may be the name of a hook.
        """
        return self._logits(self._run(self._encode(prompts), "logits", edits, None))

    def run_with_hooks(
        self,
        prompts: Any,
        return_type: str | None = "logits",
        *,
        fwd_hooks: Sequence[tuple[Any, Callable[[torch.Tensor, Any], Any]]] = (),
        **unsupported: Any,
    ) -> torch.Tensor | None:
        """Return the log-probabilities at the last token, with functions at hooks.

        The engine needs ``steering_config={"user_hooks": True}``, see :meth:`vllm_steer.LLM.register_hook`.

        Args:
            prompts: As for :meth:`run_with_cache`.
            return_type: ``"logits"`` or None.
            fwd_hooks: ``(name, function)``; a name may be a function of names. Functions get the rows of one prompt,
                ``[1, tokens, hidden]``, and the argument ``hook``, an object with ``name`` and ``layer()``.
            **unsupported: Other arguments of TransformerLens, which are refused.

        Raises:
            SteeringError: An argument is invalid, or the engine runs no user hooks.
            RuntimeError: A function failed.
        """
        refuse(unsupported)
        tokens = self._encode(prompts)
        with ExitStack() as stack:
            for names, function in fwd_hooks:
                for point, layers in self._read_filter(names).items():
                    for layer in layers:
                        hook = on_prompts(function, hook_name(point, layer), layer, len(tokens[0]))
                        stack.enter_context(self.llm.register_hook(hook, point, layer))
            outputs = self._run(tokens, return_type, (), None)
        return self._logits(outputs) if return_type else None

    def __call__(self, prompts: Any, return_type: str | None = "logits", **unsupported: Any) -> torch.Tensor | None:
        """Return the log-probabilities at the last token, ``[batch, 1, vocab]``; refuse other arguments."""
        refuse(unsupported)
        outputs = self._run(self._encode(prompts), return_type, (), None)
        return self._logits(outputs) if return_type else None

    def generate(self, prompt: Any, max_new_tokens: int = 10, **kwargs: Any) -> str:
        """Return the prompt's text with the generated text, greedy by default.

        Args:
            prompt: One prompt, as for :meth:`run_with_cache`. Special tokens that the tokenizer adds to a
                text, such as BOS, are not part of the result.
            max_new_tokens: Most tokens to generate.
            **kwargs: Arguments of ``SamplingParams``.

        Raises:
            SteeringError: There are several prompts, or an argument of TransformerLens is not supported.
            RuntimeError: The request ended with an error, for example because a user hook failed.
        """
        refuse_names(kwargs, _REFUSED[GENERATING])
        encoded = self._encode(prompt)
        if len(encoded) > 1:
            raise SteeringError("prompt", f"has {len(encoded)} prompts; generate serves one, and llm.generate several")
        (tokens,) = encoded
        (output,) = self.run([tokens], self.params(**{**kwargs, "max_tokens": max_new_tokens}))
        shown_tokens = self.tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else tokens
        return str(self.tokenizer.decode([*shown_tokens, *output.outputs[0].token_ids]))

    def _encode(self, prompts: Any) -> list[list[int]]:
        tokens = self.encode_all(prompts)
        if len({len(each) for each in tokens}) > 1:
            counts = ", ".join(str(len(each)) for each in tokens[:8])
            raise SteeringError(
                "prompts", f"have different numbers of tokens ({counts}); there is no padding here, so run them apart"
            )
        return tokens

    def _read_filter(self, names: Any) -> dict[str, list[int]]:
        if names is None:
            chosen = list(self.hook_names)
        elif callable(names):
            chosen = [name for name in self.hook_names if names(name)]
        else:
            chosen = [names] if isinstance(names, str) else list(names)
        if not chosen:
            raise SteeringError("names_filter", "selects no hook; hook_names lists those of this engine")
        sites = [site(name, num_layers=self.cfg.n_layers) for name in chosen]
        for name, (point, layer) in zip(chosen, sites, strict=True):
            if reason := self.points[point]["unread"].get(layer):
                raise SteeringError("names_filter", f"{name} is not supported: {reason}")
            if hook_name(point, layer) not in self.hook_names:
                raise SteeringError("names_filter", f"{name} is not enabled; add {point} to --steering-points")
        return hooks_of(sites)

    def _run(self, tokens: list[list[int]], return_type: str | None, edits: Sequence[Edit], capture: Any) -> list[Any]:
        if return_type not in ("logits", None):
            raise SteeringError(
                "return_type",
                f"must be 'logits' or None, not {shown(return_type)}; SteeringDriver with sequence_logits=True serves "
                "the loss",
            )
        fields = self.all_logprobs() if return_type == "logits" else {"detokenize": False}
        return self.run(tokens, self.params(edits=edits, capture=capture, **fields))

    def _logits(self, outputs: list[Any]) -> torch.Tensor:
        return torch.stack([self.log_probabilities(output.outputs[0].logprobs) for output in outputs])[:, None]

    def __getattr__(self, name: str) -> NoReturn:
        refuse_attribute(self, name, _REFUSED[MODEL])


def refuse(arguments: Iterable[str]) -> None:
    """Raise SteeringError for an argument of a method that runs the model."""
    refuse_names(arguments, _REFUSED[ARGUMENT], "is not an argument of this method; omit it")


TransformerBridge = HookedTransformer
"""Name of the class in TransformerLens 4."""
