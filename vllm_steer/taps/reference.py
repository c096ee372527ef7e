# SPDX-License-Identifier: Apache-2.0
"""The definition of every instruction, in plain torch.

This file is the truth: the Triton kernel is tested against it, and it is what runs on CPU. All arithmetic is float32;
a caller adds the change to its summand and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_steer.program import instructions as ops
from vllm_steer.taps.tables import Tables

# Each takes the stream ``x`` [n, hidden], one vector per token ``v`` [n, hidden] (of unit length except for ADD) and
# ``strength``, ``low``, ``high`` [n, 1], all float32, and returns the new stream.
Definition = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def add(x: torch.Tensor, v: torch.Tensor, s: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """``x + s v``."""
    return x + s * v


def add_normed(
    x: torch.Tensor, v: torch.Tensor, s: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> torch.Tensor:
    """``x + s |x| v``: a change of ``s`` times the stream's own length."""
    length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x + s * length * v


def ablate(x: torch.Tensor, v: torch.Tensor, s: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """``x - s (x.v) v``: at ``s = 1`` the component along ``v`` is gone."""
    return x - s * (x * v).sum(-1, keepdim=True) * v


def clamp(x: torch.Tensor, v: torch.Tensor, s: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """``x + s (clip(c, low, high) - c) v`` with ``c = x.v``: at ``s = 1`` the component lies within the bounds."""
    c = (x * v).sum(-1, keepdim=True)
    return x + s * (torch.minimum(torch.maximum(c, low), high) - c) * v


DEFINITIONS: dict[int, Definition] = {ops.ADD: add, ops.ADD_NORMED: add_normed, ops.ABLATE: ablate, ops.CLAMP: clamp}


def apply_tap(target: torch.Tensor, other: torch.Tensor | None, head: torch.Tensor, tables: Tables) -> None:
    """Run one site's instructions on the stream ``target + other`` and write the change into ``target``, in place.

    ``target`` and ``other`` are ``[tokens, hidden]``, the stream's summands in model dtype (``other`` None: the stream
    is ``target`` alone). ``head`` ``[rows + 1]`` int32 gives each row's first instruction at this site, 0 for none; its
    row 0 is not looked into, since a token with that row has no instructions.
    Instructions of a token run in the order in which its request gave them; a CAPTURE stores the stream as it is then
    in the arena, at ``token_base`` plus the instruction's index, rounded to the arena's dtype.
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
