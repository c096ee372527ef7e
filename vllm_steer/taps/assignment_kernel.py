# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for :mod:`vllm_steer.taps.assignment`, which is the definition."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_steer.taps.assignment import BatchLayout
from vllm_steer.taps.tables import Tables

_TOKENS, _SCANNED = 64, 1024


# Batch sizes are not specialized, since every specialization would compile another kernel while serving.
@triton.jit(do_not_specialize=["requests", "tokens", "padded"])  # type: ignore[untyped-decorator, unused-ignore]
def _rows_kernel(  # type: ignore[no-untyped-def]
    slot, start, position, segment_start, segment_row, token_row, token_offset,
    requests, tokens, padded, segments,
    SEARCH_STEPS: tl.constexpr, TOKENS: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = token < tokens
    # Binary search for the last request that starts at or before the token.
    low = tl.zeros([TOKENS], dtype=tl.int32)
    high = tl.zeros([TOKENS], dtype=tl.int32) + requests
    for _ in range(SEARCH_STEPS):
        middle = (low + high) // 2
        before = tl.load(start + middle, mask=real & (middle < requests), other=2147483647) <= token
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    place = tl.load(slot + low, mask=real, other=0).to(tl.int64)
    where = tl.load(position + token, mask=real, other=0)
    column = tl.arange(0, SEGMENTS)
    inside = real[:, None] & (column < segments)[None, :]
    starts = tl.load(segment_start + place[:, None] * segments + column[None, :], mask=inside, other=2147483647)
    segment = tl.sum((starts <= where[:, None]).to(tl.int32), axis=1) - 1
    segment = tl.maximum(segment, 0)
    row = tl.load(segment_row + place * segments + segment, mask=real, other=0)
    tl.store(token_row + token, row, mask=token < padded)
    first = tl.load(segment_start + place * segments + segment, mask=real, other=0)
    tl.store(token_offset + token, (where - first).to(tl.int32), mask=real)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator, unused-ignore]
def _arena_offsets_kernel(token_row, row_captures, token_base, tokens, SCANNED: tl.constexpr):  # type: ignore[no-untyped-def]
    before = tl.zeros([], dtype=tl.int64)
    for first in range(0, tokens, SCANNED):
        token = first + tl.arange(0, SCANNED)
        real = token < tokens
        row = tl.load(token_row + token, mask=real, other=0)
        count = tl.load(row_captures + row, mask=real, other=0).to(tl.int64)
        tl.store(token_base + token, before + tl.cumsum(count, axis=0) - count, mask=real)
        before += tl.sum(count, axis=0)


def launch_rows(tables: Tables, layout: BatchLayout, num_padded: int) -> None:
    """Run :func:`vllm_steer.taps.assignment.assign_rows` as one kernel."""
    requests, segments = layout.request_slot.shape[0], tables.segment_start.shape[1]
    grid: Any = (triton.cdiv(num_padded, _TOKENS),)
    _rows_kernel[grid](
        layout.request_slot,
        layout.start,
        layout.position,
        tables.segment_start,
        tables.segment_row,
        tables.token_row,
        tables.token_offset,
        requests,
        layout.position.shape[0],
        num_padded,
        segments,
        # Enough for the largest batch, so that all batch sizes share one kernel.
        SEARCH_STEPS=tables.segment_start.shape[0].bit_length() + 1,
        TOKENS=_TOKENS,
        SEGMENTS=triton.next_power_of_2(segments),
    )


def launch_arena_offsets(tables: Tables, tokens: int) -> None:
    """Run :func:`vllm_steer.taps.assignment.assign_arena_offsets` as one kernel with one program."""
    grid: Any = (1,)
    _arena_offsets_kernel[grid](tables.token_row, tables.row_captures, tables.token_base, tokens, SCANNED=_SCANNED)


def warm_up(tables: Tables) -> None:
    """Compile the kernels, so that the first request with a program does not wait for it."""
    device = tables.device
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    launch_rows(tables, BatchLayout(zero, torch.tensor([0, 1], dtype=torch.int32, device=device), zero, zero.int()), 1)
    launch_arena_offsets(tables, 1)
