# SPDX-License-Identifier: Apache-2.0
"""Edits and reads of the residual stream in HF Transformers, by the identities of the hook points.

One forward pass over the whole sequence, without a cache, in float32. HF's blocks keep the stream in one tensor, so the
three points are a block's input, its output, and its input plus the attention branch; an edit of the latter is
added to the branch, which is the one place from which both the MLP and the residual sum see it.
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

from tests.conformance.edits import EditAt, Rows, positions
from tests.conformance.zoo import TinyModel

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
    """What one forward pass gave: ``logprobs`` ``[tokens, vocab]`` and the streams ``[layers, tokens, hidden]``.

    The streams are those with which the model went on, after the edits of their own point.
    """

    logprobs: Array
    x_in: Array
    x_mid: Array
    x_out: Array


def interventions(edits: Sequence[EditAt], num_layers: int, prompt_len: int, length: int) -> list[Intervention]:
    """A request's edits on a sequence of ``length`` tokens, in the order given."""
    return [
        Intervention(edit.point, layer, positions(edit.tokens, prompt_len, length), edit.formula)
        for edit in edits
        for layer in edit.layer_numbers(num_layers)
    ]


class Reference:
    """An HF model of the zoo, with hooks on its blocks."""

    def __init__(self, tiny: TinyModel, model: PreTrainedModel) -> None:
        self.tiny = tiny
        self.model = model
        self.blocks: list[nn.Module] = list(model.get_submodule(tiny.blocks))
        self.scale = float(getattr(model.config, tiny.multiplier)) if tiny.multiplier else 1.0

    @torch.no_grad()
    def run(self, token_ids: Sequence[int], edits: Sequence[Intervention] = ()) -> Trace:
        """One pass over ``token_ids``; raises ValueError for an edit at a point that does not exist."""
        for edit in edits:
            if edit.point == "post_attn" and self.tiny.reads_mid is None:
                raise ValueError(f"{self.tiny.name}: no edit at post_attn can reach the MLP of a parallel block")
        length = len(token_ids)
        streams = {name: torch.empty(len(self.blocks), length, self.model.config.hidden_size) for name in _STREAMS}
        with self._hooks(edits, streams):
            logits = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return Trace(_array(logits.log_softmax(-1)), *(_array(streams[name]) for name in _STREAMS))

    @torch.no_grad()
    def hidden_states(self, token_ids: Sequence[int]) -> list[Array]:
        """HF's own ``hidden_states`` of a plain run, each ``[tokens, hidden]``."""
        ids = torch.tensor([list(token_ids)])
        return [
            _array(states[0]) for states in self.model(ids, use_cache=False, output_hidden_states=True).hidden_states
        ]

    def watch(
        self, layer: int, module: str, token_ids: Sequence[int], edits: Sequence[Intervention] = ()
    ) -> tuple[Array, Array]:
        """What a module of one block is given and returns during a run, each ``[tokens, hidden]``."""
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
            branch = block.get_submodule(self.tiny.branch)
            handles += [
                block.register_forward_pre_hook(_before_block(number, here, streams), with_kwargs=True),
                branch.register_forward_hook(_after_branch(number, here, streams, self.scale)),
                block.register_forward_hook(_after_block(number, here, streams)),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


_STREAMS = ("x_in", "x_mid", "x_out")


def _before_block(number: int, edits: Sequence[Intervention], streams: dict[str, torch.Tensor]) -> Any:
    def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        stream = _edited(given[0], "pre_attn", edits)
        streams["x_in"][number] = stream
        if args:
            return (stream[None], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": stream[None]}

    return hook


def _after_branch(number: int, edits: Sequence[Intervention], streams: dict[str, torch.Tensor], scale: float) -> Any:
    def hook(branch: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        added = _first(output)
        before = streams["x_in"][number] + scale * added[0]
        stream = _edited(before, "post_attn", edits)
        streams["x_mid"][number] = stream
        return _with_first(output, added + (stream - before) / scale)

    return hook


def _after_block(number: int, edits: Sequence[Intervention], streams: dict[str, torch.Tensor]) -> Any:
    def hook(block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        stream = _edited(_first(output)[0], "post_block", edits)
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
