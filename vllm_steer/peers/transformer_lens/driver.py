# SPDX-License-Identifier: Apache-2.0
"""The protocol ``Driver`` of TransformerLens 4, for its ``RemoteBridge``.

With this driver, ``run_with_cache``, patching and other tools of TransformerLens that need no weights run on an engine,
in batches and with its prefix cache. Functions at hooks of the bridge can only read, because the engine has run when
they are called; a function that changes rows raises an error. TransformerLens is not imported: the driver returns an
object with the attributes of its ``ForwardResult``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_steer import Edit, site
from vllm_steer.adapters import is_integer, read_choice, read_number, shown
from vllm_steer.errors import SteeringError
from vllm_steer.peers.engines import hooks_of, rows_of
from vllm_steer.peers.transformer_lens.hooks import ReadOnlyRows
from vllm_steer.peers.transformer_lens.model import HookedTransformer

OPERATIONS = {
    "suppress": frozenset[str](),
    "scale": frozenset({"factor"}),
    "add": frozenset({"value"}),
    "set": frozenset({"value"}),
}
"""Operations of an intervention, with the keys that each needs. All take ``pos``."""


@dataclass(frozen=True)
class DriverResult:
    """Results of one forward pass, with the attributes of TransformerLens' ``ForwardResult``."""

    logits: torch.Tensor | None = None
    """Log-probabilities ``[batch, tokens, vocab]``; -inf ahead of the last token without ``sequence_logits``."""
    captured: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Rows ``[batch, tokens, hidden]`` by hook."""
    new_tokens: torch.Tensor | None = None
    """Generated tokens ``[batch, max_new_tokens]``."""
    raw_output: Any = None
    """Outputs of ``LLM.generate``."""


class SteeringDriver:
    """A driver that runs on a ``vllm_steer.LLM``.

    Args:
        llm: An engine with steering and ``max_logprobs=-1``.
        bridge_config: TransformerLens' configuration of the model, ``adapter.cfg``.
        tokenizer: The tokenizer of the bridge; the engine's by default.
        sequence_logits: Whether logits of all tokens are returned, which vLLM computes as prompt log-probabilities: the
            loss needs them, and they take more time than the forward pass. Otherwise only the last token has logits.

    Raises:
        SteeringError: The engine does not fit.

    Examples:
        >>> from vllm_steer.peers.transformer_lens import SteeringDriver  # doctest: +SKIP
        >>> bridge = RemoteBridge(adapter, tokenizer, SteeringDriver(llm, adapter.cfg, tokenizer))  # doctest: +SKIP
        >>> _, cache = bridge.run_with_cache("The cat sat")  # doctest: +SKIP
    """

    def __init__(self, llm: Any, bridge_config: Any, tokenizer: Any = None, *, sequence_logits: bool = False) -> None:
        self._model = HookedTransformer(llm)
        self.bridge_config = bridge_config
        self.tokenizer = self._model.tokenizer if tokenizer is None else tokenizer
        facts = {"n_layers": self._model.cfg.n_layers, "d_model": self._model.cfg.d_model}
        for name, value in facts.items():
            if getattr(bridge_config, name, value) != value:
                raise SteeringError(
                    "bridge_config", f"has {name}={getattr(bridge_config, name)}; the engine has {value}"
                )
        self.architecture = str(getattr(bridge_config, "architecture", None) or "")
        self.supported_hook_points = frozenset(self._model.hook_names)
        self.non_fireable_hook_points: frozenset[str] = frozenset()
        self.provides_sequence_logits = sequence_logits

    def forward(
        self,
        input_ids: Any = None,
        *,
        capture: Sequence[str] = (),
        intervene: Mapping[str, Any] | None = None,
        max_new_tokens: int = 1,
        return_logits: bool = True,
        **kwargs: Any,
    ) -> DriverResult:
        """Forward prompts, and generate.

        Args:
            input_ids: Tokens ``[batch, tokens]`` or ``[tokens]``.
            capture: Names of the hooks whose rows are returned.
            intervene: Operations by name of the hook: ``{"op": "add", "value": vector, "pos": [3]}``.
            max_new_tokens: Number of tokens to generate.
            return_logits: Whether log-probabilities are returned.
            **kwargs: ``attention_mask`` of ones, and ``output_attentions``, which has no effect; others are refused.

        Raises:
            SteeringError: An argument is invalid or not served.
            RuntimeError: Rows are missing, or a request ended with an error.
        """
        tokens = _read_tokens(input_ids)
        mask = kwargs.pop("attention_mask", None)
        if mask is not None and not bool(torch.as_tensor(mask).bool().all()):
            raise SteeringError("attention_mask", "masks tokens; prompts are not padded, so run prompts of one length")
        # run_with_cache sets it in any case. Attention patterns are not among the hooks of this driver.
        kwargs.pop("output_attentions", None)
        if kwargs:
            raise SteeringError(next(iter(kwargs)), "is not supported by this driver; omit it")
        names = [self._known(name, "capture") for name in capture]
        edits = [edit for name, spec in (intervene or {}).items() for edit in self._edits(name, spec)]
        fields: dict[str, Any] = self._model.all_logprobs() if return_logits else {"detokenize": False}
        if return_logits and self.provides_sequence_logits:
            fields["prompt_logprobs"] = -1
        sites = {name: site(name) for name in names}
        spec = {"hooks": hooks_of(sites.values()), "positions": "all_prompt"} if names else None
        params = self._model.params(edits=edits, capture=spec, max_tokens=max_new_tokens, **fields)
        outputs = self._model.run(tokens, params)
        found = [rows_of(output, f"input_ids[{i}]") for i, output in enumerate(outputs)] if names else []
        return DriverResult(
            torch.stack([self._logits(output) for output in outputs]) if return_logits else None,
            ReadOnlyRows({name: torch.stack([rows.tensor(*sites[name]) for rows in found]) for name in names}),
            _new_tokens(outputs),
            outputs,
        )

    def close(self) -> None:
        """Do nothing: the engine belongs to the caller."""

    def supports(self, feature: str) -> bool:
        """Return False: gradients, parameters and callbacks are not served."""
        return False

    def _known(self, name: Any, field: str) -> str:
        if name not in self.supported_hook_points:
            raise SteeringError(field, f"{shown(name)} is not a hook of this engine; see supported_hook_points")
        return str(name)

    def _edits(self, name: str, spec: Any) -> Iterator[Edit]:
        path = f"intervene.{self._known(name, 'intervene')}"
        if not isinstance(spec, Mapping):
            raise SteeringError(path, 'must be a dict such as {"op": "add", "value": vector}; functions are not run')
        operation = read_choice(spec.get("op"), tuple(OPERATIONS), f"{path}.op")
        needed = OPERATIONS[operation]
        if not needed <= set(spec) <= needed | {"op", "pos"}:
            keys = ", ".join(sorted({"op", *needed, "pos"}))
            raise SteeringError(path, f"{operation} has the keys {keys}, not {shown(sorted(map(str, spec)))}")
        tokens: Any = "prompt"
        if spec.get("pos") is not None:
            given = [spec["pos"]] if is_integer(spec["pos"]) else spec["pos"]
            if not isinstance(given, (list, tuple)) or not all(map(is_integer, given)):
                raise SteeringError(f"{path}.pos", f"must be a position or a list of positions, not {shown(given)}")
            tokens = list(given)
        point, layer = site(name)
        zeros = torch.zeros(self._model.cfg.d_model)
        place: dict[str, Any] = {"point": point, "layers": layer, "tokens": tokens}
        if operation == "suppress":
            yield Edit(kind="replace", vector=zeros, **place)
        elif operation == "scale":
            factor = read_number(spec["factor"], f"{path}.factor")
            yield Edit(kind="replace", vector=zeros, strength=1.0 - factor, **place)
        else:
            vector = self._vector(spec["value"], f"{path}.value")
            yield Edit(kind="add" if operation == "add" else "replace", vector=vector, **place)

    def _vector(self, value: Any, field: str) -> torch.Tensor:
        width = self._model.cfg.d_model
        vector = torch.as_tensor(value, dtype=torch.float32).detach().cpu()
        if vector.numel() not in (1, width):
            raise SteeringError(field, f"has shape {list(vector.shape)}; must be a number or a vector [{width}]")
        return vector.reshape(-1).expand(width).contiguous()

    def _logits(self, output: Any) -> torch.Tensor:
        count = len(output.prompt_token_ids)
        found = torch.full((count, self._model.cfg.d_vocab), -torch.inf)
        found[-1] = self._model.log_probabilities(output.outputs[0].logprobs)
        if self.provides_sequence_logits:
            for i in range(1, count):
                found[i - 1] = self._model.log_probabilities(output.prompt_logprobs, i)
        return found


def _new_tokens(outputs: Sequence[Any]) -> torch.Tensor:
    rows = [list(output.outputs[0].token_ids) for output in outputs]
    longest = max(map(len, rows))
    # Answers that end early are padded with their last token.
    return torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows])


def _read_tokens(input_ids: Any) -> list[list[int]]:
    tokens = torch.as_tensor(input_ids) if input_ids is not None else torch.empty(0)
    tokens = tokens[None] if tokens.ndim == 1 else tokens
    if tokens.ndim != 2 or not tokens.numel() or tokens.is_floating_point():
        raise SteeringError("input_ids", f"must be tokens [batch, tokens], not {shown(input_ids)}")
    rows: list[list[int]] = tokens.tolist()
    return rows
