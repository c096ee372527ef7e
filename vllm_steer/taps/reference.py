# SPDX-License-Identifier: Apache-2.0
"""Definition of every instruction in plain torch.

This is what runs on CPU, and the Triton kernel is tested against it. Arithmetic is float32; the change is added to the
summand and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_steer.program import instructions as ops
from vllm_steer.taps.tables import Tables

# Arguments, all float32: the stream [n, hidden], one vector per token [n, hidden] (unit length except for ADD), and
# strength, low, high [n, 1]. Returns the new stream.
Definition = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def add(x: torch.Tensor, v: torch.Tensor, s: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return ``x + s v``."""
    return x + s * v


def add_normed(
    x: torch.Tensor, u: torch.Tensor, s: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> torch.Tensor:
    """Return ``x + s ||x|| u``, a change of ``s`` times the stream's norm."""
    length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x + s * length * u


def ablate(x: torch.Tensor, u: torch.Tensor, s: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return ``x - s (x.u) u``; with ``s = 1`` the component along ``u`` is zero."""
    return x - s * (x * u).sum(-1, keepdim=True) * u


def clamp(x: torch.Tensor, u: torch.Tensor, s: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return ``x + s (clip(c, low, high) - c) u`` with ``c = x.u``; with ``s = 1`` the component is within bounds."""
    c = (x * u).sum(-1, keepdim=True)
    return x + s * (torch.minimum(torch.maximum(c, low), high) - c) * u


DEFINITIONS: dict[int, Definition] = {ops.ADD: add, ops.ADD_NORMED: add_normed, ops.ABLATE: ablate, ops.CLAMP: clamp}


def apply_tap(target: torch.Tensor, other: torch.Tensor | None, head: torch.Tensor, tables: Tables) -> None:
    """Run one site's instructions on the stream and add the change to ``target`` in place.

    The instructions of a token run in the order of its request. CAPTURE stores the current stream in the arena, at
    ``token_base`` plus the instruction's index, rounded to the arena's dtype.

    Args:
        target: ``[tokens, hidden]`` in the model's dtype.
        other: The stream's second summand, None if ``target`` is the whole stream.
        head: ``[rows + 1]`` int32, the first instruction of each row at this site, 0 for none. Item 0 is ignored, since
            row 0 has no instructions.
        tables: The rank's device tables.
    """
    row = tables.token_row[: target.shape[0]].long()
    current = torch.where(row != 0, head[row].long(), 0)
    touched = current.nonzero().squeeze(1)
    if touched.numel() == 0:
        return
    before = target[touched].float()
    stream = before if other is None else before + other[touched].float()
    start = stream
    current = current[touched]
    base = tables.token_base[touched]
    while True:
        active = current.nonzero().squeeze(1)
        if active.numel() == 0:
            break
        record = tables.instruction[current[active]]
        numbers = tables.parameter[current[active]]
        x = stream[active]
        new = x.clone()
        for code, definition in DEFINITIONS.items():
            of_kind = (record[:, 0] == code).nonzero().squeeze(1)
            if of_kind.numel():
                v = tables.vector[record[of_kind, 1].long()]
                s, low, high = (numbers[of_kind, i : i + 1] for i in range(3))
                new[of_kind] = definition(x[of_kind], v, s, low, high)
        stored = (record[:, 0] == ops.CAPTURE).nonzero().squeeze(1)
        if stored.numel():
            place = base[active[stored]] + record[stored, 1]
            inside = place < tables.arena.shape[0]
            tables.arena[place[inside]] = x[stored[inside]].to(tables.arena.dtype)
        stream = stream.index_copy(0, active, new)
        current = current.index_copy(0, active, record[:, 2].long())
    target[touched] = (before + (stream - start)).to(target.dtype)
