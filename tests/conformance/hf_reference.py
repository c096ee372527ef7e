# SPDX-License-Identifier: Apache-2.0
"""Edits and captures of the residual stream in HF Transformers, by the identities of the hook points.

One forward pass over the whole sequence, without a cache, in float32. HF's blocks keep the stream in one tensor, so the
three points are a block's input, its output, and its input plus the attention branch. An edit of the latter is added to
the branch, from which both the MLP and the residual sum read it. The branches are the differences of these points; the
MLP's input is the output of the norm before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.conformance.branches import BRANCHES, supported_branches
from tests.conformance.edits import EditAt, Rows, positions
from tests.conformance.model import TinyModel

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Intervention:
    """``rows`` applied at one point of one layer, to the rows of some absolute positions."""

    point: str
    layer: int
    positions: Sequence[int]
    rows: Rows


@dataclass(frozen=True)
class Trace:
    """Result of one forward pass: ``logprobs`` ``[tokens, vocab]`` and the streams ``[layers, tokens, hidden]``.

    The streams, the branches and the MLP's input are taken after the edits of their own point. The MLP's input is NaN
    if no norm computes it.
    """

    logprobs: Array
    x_in: Array
    x_mid: Array
    x_out: Array
    attn_out: Array | None = None
    mlp_in: Array | None = None
    mlp_out: Array | None = None


def interventions(edits: Sequence[EditAt], num_layers: int, prompt_len: int, length: int) -> list[Intervention]:
    """Return a request's edits on a sequence of ``length`` tokens, in their order."""
    return [
        Intervention(edit.point, layer, positions(edit.tokens, prompt_len, length), edit.formula)
        for edit in edits
        for layer in edit.layer_numbers(num_layers)
    ]


def _exact_gelu(mlp: Any) -> None:
    mlp.gelu_impl = nn.GELU()


def _bfloat16_activation(mlp: Any) -> None:
    mlp.act_fn.to(torch.bfloat16)


_AS_IN_VLLM = {"exact GELU": _exact_gelu, "activation in bfloat16": _bfloat16_activation}


class Reference:
    """An HF model of the zoo, with hooks on its blocks."""

    def __init__(self, tiny: TinyModel, model: PreTrainedModel) -> None:
        self.tiny = tiny
        self.model = model
        self.blocks: list[nn.Module] = list(model.get_submodule(tiny.blocks))
        scale = tiny.multiplier if tiny.multiplier is not None else 1.0
        self.scale = float(getattr(model.config.get_text_config(), scale) if isinstance(scale, str) else scale)
        if tiny.as_in_vllm is not None:
            for block in self.blocks:
                _AS_IN_VLLM[tiny.as_in_vllm](block.get_submodule("mlp"))

    def branches(self, number: int) -> list[nn.Module]:
        """Return the modules of a block whose outputs sum to its attention branch; none if it has only an MLP."""
        block, names = self.blocks[number], self.tiny.branch
        if number in self.tiny.mlp_blocks:
            return []
        if "+" in names:
            return [block.get_submodule(name) for name in names.split("+")]
        there = (name for name in names.split("|") if getattr(block, name.split(".")[0], None) is not None)
        return [block.get_submodule(next(there))]

    @torch.no_grad()
    def run(self, token_ids: Sequence[int], edits: Sequence[Intervention] = ()) -> Trace:
        """Run one pass over ``token_ids``; raise ValueError for an edit at a refused point."""
        for edit in edits:
            if edit.point in self.tiny.refused:
                raise ValueError(f"{self.tiny.name}: no edit at {edit.point} can reach the MLP of this block")
        length = len(token_ids)
        streams = {
            name: torch.full((len(self.blocks), length, self.model.config.get_text_config().hidden_size), torch.nan)
            for name in _STREAMS
        }
        with self._hooks(edits, streams):
            logits = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return Trace(_array(logits.log_softmax(-1)), *(_array(streams[name]) for name in _STREAMS))

    @torch.no_grad()
    def hidden_states(self, token_ids: Sequence[int]) -> list[Array]:
        """Return HF's own ``hidden_states`` of a plain run, each ``[tokens, hidden]``."""
        ids = torch.tensor([list(token_ids)])
        return [
            _array(states[0]) for states in self.model(ids, use_cache=False, output_hidden_states=True).hidden_states
        ]

    def watch(
        self, layer: int, module: str, token_ids: Sequence[int], edits: Sequence[Intervention] = ()
    ) -> tuple[Array, Array]:
        """Return the input and the output of a module of one block during a run, each ``[tokens, hidden]``."""
        seen: list[torch.Tensor] = []

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            seen.extend((given.clone(), _first(output).clone()))

        handle = self.blocks[layer].get_submodule(module).register_forward_hook(hook, with_kwargs=True)
        self.run(token_ids, edits)
        handle.remove()
        given, returned = (_array(tensor).reshape(len(token_ids), -1) for tensor in seen)
        return given, returned

    @contextmanager
    def _hooks(self, edits: Sequence[Intervention], streams: dict[str, torch.Tensor]) -> Iterator[None]:
        handles = []
        for number, block in enumerate(self.blocks):
            here = [edit for edit in edits if edit.layer == number]
            *others, last = self.branches(number) or [None]
            # Outputs of the modules that run before the last one.
            partial: list[torch.Tensor] = []
            handles += [
                block.register_forward_pre_hook(_before_block(number, here, streams, last is None), with_kwargs=True),
                *(other.register_forward_hook(_collect(partial)) for other in others),
                block.register_forward_hook(_after_block(number, here, streams)),
            ]
            if last is not None:
                hook = _after_branch(number, here, streams, self.scale, partial)
                handles.append(last.register_forward_hook(hook))
            if "mlp_in" in supported_branches(self.tiny):
                norm = block.get_submodule(self.tiny.reads_mid or "")
                handles.append(norm.register_forward_hook(_after_norm(number, here, streams)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


_STREAMS = ("x_in", "x_mid", "x_out", *BRANCHES)


def _collect(partial: list[torch.Tensor]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        partial.append(_first(output)[0])

    return hook


def _before_block(number: int, edits: Sequence[Intervention], streams: dict[str, torch.Tensor], only_mlp: bool) -> Any:
    def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        stream = _edited(given[0], "pre_attn", edits)
        streams["x_in"][number] = stream
        if only_mlp:
            stream = _edited(stream, "post_attn", edits)
            streams["x_mid"][number] = stream
        if args:
            return (stream[None], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": stream[None]}

    return hook


def _after_branch(
    number: int,
    edits: Sequence[Intervention],
    streams: dict[str, torch.Tensor],
    scale: float,
    partial: list[torch.Tensor],
) -> Any:
    def hook(branch: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        added = _first(output)
        whole = scale * sum(partial, start=added[0])
        before = streams["x_in"][number] + whole
        partial.clear()
        streams["attn_out"][number] = _edited(whole, "attn_out", edits)
        stream = _edited(before + (streams["attn_out"][number] - whole), "post_attn", edits)
        streams["x_mid"][number] = stream
        return _with_first(output, added + (stream - before) / scale)

    return hook


def _after_norm(number: int, edits: Sequence[Intervention], streams: dict[str, torch.Tensor]) -> Any:
    def hook(norm: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        streams["mlp_in"][number] = _edited(output.reshape(-1, output.shape[-1]), "mlp_in", edits)
        return streams["mlp_in"][number].reshape(output.shape).clone()

    return hook


def _after_block(number: int, edits: Sequence[Intervention], streams: dict[str, torch.Tensor]) -> Any:
    def hook(block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        before = _first(output)[0]
        branch = before - streams["x_mid"][number]
        streams["mlp_out"][number] = _edited(branch, "mlp_out", edits)
        stream = _edited(before + (streams["mlp_out"][number] - branch), "post_block", edits)
        streams["x_out"][number] = stream
        return _with_first(output, stream[None])

    return hook


def _edited(stream: torch.Tensor, point: str, edits: Sequence[Intervention]) -> torch.Tensor:
    stream = stream.clone()
    for edit in edits:
        if edit.point == point:
            at = torch.tensor(edit.positions, dtype=torch.long)
            stream[at] = edit.rows(stream[at])
    return stream


def _first(output: Any) -> torch.Tensor:
    first: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return first


def _with_first(output: Any, first: torch.Tensor) -> Any:
    return (first, *output[1:]) if isinstance(output, tuple) else first


def _array(tensor: torch.Tensor) -> Array:
    return tensor.numpy().copy()
