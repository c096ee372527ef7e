# SPDX-License-Identifier: Apache-2.0
"""A model with the attributes and methods of nnterp's ``StandardizedTransformer``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from vllm_steer import Edit, SamplingParams, site
from vllm_steer.adapters import MASK_HINT, is_integer, refuse_repeated, shown
from vllm_steer.errors import SteeringError
from vllm_steer.peers.engines import Engine, rows_of
from vllm_steer.peers.nnterp.trace import Sites, Tracer
from vllm_steer.peers.nnterp.values import LogProbabilities, Probabilities
from vllm_steer.peers.refusals import MODEL, REFUSALS, refuse_attribute, refuse_names

SITES: Mapping[str, str] = {
    "layers_input": "pre_attn",
    "layers_output": "post_block",
    "attentions_output": "attn_out",
    "mlps_input": "mlp_in",
    "mlps_output": "mlp_out",
}
"""Our points by nnterp's names of sites, in layers that do not alter what attention and MLP return."""


class StandardizedTransformer(Engine):
    """A model that runs on an offline engine.

    Examples:
        >>> from vllm_steer.peers.nnterp import StandardizedTransformer  # doctest: +SKIP
        >>> model = StandardizedTransformer("demo/model")  # doctest: +SKIP
        >>> model.get_token_activations(["one", "two"], layers=[1]).shape  # doctest: +SKIP
    """

    def __init__(self, model: Any, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self._edits: list[Edit] = []
        self._tracer: Tracer | None = None

    def params(
        self, *, edits: Iterable[Edit] = (), capture: Any = None, steered: bool = True, **fields: Any
    ) -> SamplingParams:
        """Return greedy sampling parameters for one token, with the edits of :meth:`steer` first if ``steered``."""
        return super().params(edits=[*(self._edits if steered else ()), *edits], capture=capture, **fields)

    def read_layers(self, layers: Any, field: str = "layers") -> list[int]:
        """Return layers in the order given, without negative numbers; None is all layers.

        Raises:
            SteeringError: A layer does not exist.
        """
        if layers is None:
            return list(range(self.num_layers))
        given = [layers] if is_integer(layers) else list(layers)
        for layer in given:
            if not is_integer(layer) or not -self.num_layers <= layer < self.num_layers:
                has = f"this model has layers 0 to {self.num_layers - 1}"
                raise SteeringError(field, f"layer {shown(layer)} does not exist; {has}")
        if not given:
            raise SteeringError(field, "is empty; name at least one layer")
        return [int(layer) % self.num_layers for layer in given]

    def point_of(self, name: str, layers: Iterable[int]) -> str:
        """Return the hook point of one of nnterp's sites.

        Args:
            name: Name of the site without its layer.
            layers: Layers, from 0, that are read or written.

        Raises:
            SteeringError: The name means another quantity than the point in one of the layers.
        """
        point = SITES[name]
        for layer in layers:
            if layer in self.points[point]["altered"]:
                raise SteeringError(
                    name,
                    f"is not a hook point in layer {layer} of this model, which adds something else to the stream than "
                    f"this module returns, for example its norm; use {point} in captures, edits and get_activations",
                )
        return point

    def get_token_activations(
        self, prompts: Any, layers: Any = None, get_activations: str = "layers_output", idx: int | None = None
    ) -> torch.Tensor:
        """Return the rows of one token of each prompt.

        Args:
            prompts: A text, a list of texts, or lists of tokens.
            layers: Layers in the order of the result; all by default.
            get_activations: Name of the site without its layer, such as ``"mlps_output"``.
            idx: Position of the token, from the prompt's start, or from its end if negative; the last by default.

        Returns:
            ``[layers, prompts, hidden]``, on the CPU.

        Raises:
            SteeringError: An argument is invalid.
            RuntimeError: Rows are missing.
        """
        chosen = self.read_layers(layers)
        if not isinstance(get_activations, str):
            raise SteeringError("get_activations", 'must be the name of a site, such as "mlps_output"; not a function')
        named = get_activations in SITES
        point = self.point_of(get_activations, chosen) if named else site(f"{get_activations}.0")[0]
        encoded = self.encode_all(prompts)
        positions: list[int] = []
        for i, tokens in enumerate(encoded):
            position = len(tokens) - 1 if idx is None else idx + len(tokens) if idx < 0 else idx
            if not 0 <= position < len(tokens):
                raise SteeringError("idx", f"{idx} is not a position of prompts[{i}], which has {len(tokens)} tokens")
            positions.append(position)
        hooks = {point: sorted(set(chosen))}
        params = [self.params(capture={"hooks": hooks, "positions": [position]}) for position in positions]
        results = [rows_of(output, f"prompts[{i}]") for i, output in enumerate(self.run(encoded, params))]
        return torch.stack([torch.cat([result.tensor(point, layer) for result in results]) for layer in chosen])

    @contextmanager
    def trace(self, prompt: Any = None, *, max_new_tokens: int = 1, **unsupported: Any) -> Iterator[Tracer]:
        """Record reads and writes of sites, and run them when the context ends.

        Within the context, ``model.layers_output[i]``, ``layers_input``, ``attentions_output``, ``mlps_input`` and
        ``mlps_output`` are rows ``[1, tokens, hidden]`` of a prompt. They have ``save()``, and ``=``, ``+=``, ``-=``
        and ``*=`` for all tokens or ``[:, tokens]``.
        ``model.next_token_probs.save()`` keeps ``[1, vocab]``, and ``model.logits.save()`` the log-probabilities
        ``[1, 1, vocab]`` at the last token.

        Args:
            prompt: A text or tokens. Without it, add prompts with ``tracer.invoke(prompt)``, which may write rows of
                other invokes.
            max_new_tokens: Number of tokens to generate, greedily. ``for step in tracer.iter[:]`` selects the forward
                pass of the reads and writes in its body: 0 for the prompt, then one for each generated token but the
                last.
            **unsupported: Other arguments of nnsight, which are refused.

        Raises:
            SteeringError: A line cannot be compiled to captures and edits.
        """
        refuse_names(unsupported, {}, "is not supported by trace")
        if self._tracer is not None:
            raise SteeringError("trace", "a trace is already open")
        if not is_integer(max_new_tokens) or max_new_tokens < 1:
            raise SteeringError("max_new_tokens", f"must be 1 or more, not {shown(max_new_tokens)}")
        self._tracer = tracer = Tracer(self, int(max_new_tokens))
        try:
            with tracer.invoke(prompt) if prompt is not None else nullcontext():
                yield tracer
        finally:
            self._tracer = None
            tracer.close()
        tracer.run()

    @property
    def next_token_probs(self) -> Any:
        """Within a trace, the probabilities ``[1, vocab]``; otherwise a function of prompts: ``[prompts, vocab]``."""
        if self._tracer is None:
            return self._next_token_probs
        return Probabilities(self._tracer.current(), self._tracer.step)

    @property
    def logits(self) -> LogProbabilities:
        """Within a trace, the log-probabilities ``[1, 1, vocab]`` at the last token, in place of logits.

        Raises:
            SteeringError: No trace is open.
        """
        if self._tracer is None:
            raise SteeringError("logits", "is read within model.trace(...); use next_token_probs(prompts) elsewhere")
        return LogProbabilities(self._tracer.current(), self._tracer.step)

    def _next_token_probs(self, prompts: Any) -> torch.Tensor:
        encoded = self.encode_all(prompts)
        return self.probabilities(encoded, [[] for _ in encoded])

    def probabilities(self, prompts: Sequence[Sequence[int]], edits: Sequence[Sequence[Edit]]) -> torch.Tensor:
        """Return the probabilities of the next token of each prompt under its edits, ``[prompts, vocab]``.

        Raises:
            SteeringError: The engine does not return all log-probabilities.
        """
        return self._log_probabilities(prompts, edits).exp()

    def _log_probabilities(
        self, prompts: Sequence[Sequence[int]], edits: Sequence[Sequence[Edit]], *, steered: bool = True
    ) -> torch.Tensor:
        params = [self.params(edits=each, steered=steered, **self.all_logprobs()) for each in edits]
        return torch.stack([self.log_probabilities(output.outputs[0].logprobs) for output in self.run(prompts, params)])

    def project_on_vocab(self, hidden_state: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities of the final norm and the head applied to rows of the last layer's output.

        The engine runs a one-token prompt whose last output is replaced by the row. nnterp returns logits, which differ
        by a constant per row.

        Args:
            hidden_state: ``[..., hidden]``.

        Returns:
            ``[..., vocab]``, on the CPU.

        Raises:
            SteeringError: The rows have another width, or the final norm does not read the stream of the points alone.
        """
        if (reason := self.mixed_head) is not None:
            raise SteeringError("project_on_vocab", f"is not supported on this model: {reason}")
        if not isinstance(hidden_state, torch.Tensor) or hidden_state.shape[-1:] != (self.hidden_size,):
            shape = list(hidden_state.shape) if isinstance(hidden_state, torch.Tensor) else shown(hidden_state)
            raise SteeringError("hidden_state", f"must be a tensor [..., {self.hidden_size}], not {shape}")
        rows = hidden_state.reshape(-1, self.hidden_size)
        edits = [[self.replace(self.num_layers - 1, row, 0)] for row in rows]
        # Not the logarithm of probabilities, which are zero below exp(-104) in float32.
        # The rows are given: edits of steer have no part in them, and their positions may lie behind the one token.
        return self._log_probabilities([[0]] * len(edits), edits, steered=False).reshape(*hidden_state.shape[:-1], -1)

    def get_topk_closest_tokens(self, hidden_state: torch.Tensor, k: int = 5) -> Any:
        """Return the k most probable tokens of rows of the last layer's output, with their probabilities.

        Returns:
            A dict for a row, a list of dicts for a matrix.
        """
        if not isinstance(hidden_state, torch.Tensor) or hidden_state.ndim not in (1, 2):
            raise SteeringError("hidden_state", "must be a tensor [hidden] or [n, hidden]")
        top = self.project_on_vocab(hidden_state).exp().topk(k)
        found = [
            dict(zip(self.tokenizer.convert_ids_to_tokens(tokens.tolist()), probs.tolist(), strict=True))
            for tokens, probs in zip(top.indices.reshape(-1, k), top.values.reshape(-1, k), strict=True)
        ]
        return found[0] if hidden_state.ndim == 1 else found

    @staticmethod
    def replace(layer: int, row: torch.Tensor, position: int, point: Any = "post_block") -> Edit:
        """Return the edit that puts a row in place of a token's."""
        rows = row.detach().float().cpu()
        return Edit(kind="replace", point=point, layers=layer, vector=rows, tokens=[position])

    def steer(
        self,
        layers: Any,
        steering_vector: torch.Tensor,
        factor: float = 1.0,
        positions: Any = None,
        token_positions: Any = None,
        batch_index: Any = None,
    ) -> AbstractContextManager[None]:
        """Add a vector to the output of layers.

        In a trace, the vector is added in the open invoke, at the step that ``tracer.iter`` selects. Elsewhere, the
        result is a context, and the vector is added in all calls within it.

        Args:
            layers: A layer or a list of layers.
            steering_vector: ``[hidden]``.
            factor: Factor of the vector.
            positions: Older name of ``token_positions``.
            token_positions: Positions of the prompt, from its end if negative; all tokens by default.
            batch_index: Refused: use an invoke for each prompt.

        Raises:
            SteeringError: An argument is invalid.
        """
        if batch_index is not None:
            raise SteeringError("batch_index", "is not supported; steer in an invoke of its own for each prompt")
        if positions is not None:
            if token_positions is not None:
                raise SteeringError("positions", "is the older name of token_positions; give one of them")
            token_positions = positions
        tokens: Any = "all"
        if token_positions is not None:
            given = torch.as_tensor(token_positions)
            if given.dtype == torch.bool:
                raise SteeringError("token_positions", f"has booleans; {MASK_HINT}")
            tokens = given.reshape(-1).tolist()
            refuse_repeated(tokens, "token_positions")
        chosen = self.read_layers(layers)
        if self._tracer is not None:
            for layer in chosen:
                rows: Any = Sites(self._tracer, "layers_output")[layer]
                for position in [None] if tokens == "all" else tokens:
                    part = rows if position is None else rows[:, position]
                    part += factor * steering_vector
            return nullcontext()
        edit = Edit(
            kind="add", point="post_block", layers=chosen, vector=steering_vector, strength=factor, tokens=tokens
        )
        return self._steered(edit)

    @contextmanager
    def _steered(self, edit: Edit) -> Iterator[None]:
        self._edits.append(edit)
        try:
            yield
        finally:
            self._edits = [each for each in self._edits if each is not edit]

    def generate(self, prompts: Any, max_new_tokens: int = 50, **kwargs: Any) -> list[Any]:
        """Return outputs of ``LLM.generate``, greedy by default, with the edits of :meth:`steer`."""
        encoded = self.encode_all(prompts)
        return self.submit(encoded, [self.params(max_tokens=max_new_tokens, **kwargs) for _ in encoded])

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_names([name], REFUSALS["nnterp"][MODEL])
        if name in SITES:
            raise SteeringError(name, f"cannot be assigned; write {name}[layer] = rows in a trace, or use steer")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in SITES:
            if self._tracer is None:
                raise SteeringError(name, "is read and written within model.trace")
            return Sites(self._tracer, name)
        refuse_attribute(self, name, REFUSALS["nnterp"][MODEL], SITES)
