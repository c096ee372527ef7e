# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for :mod:`vllm_steer.taps.records`, which is the definition."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_steer.program import records as kinds
from vllm_steer.taps.assignment import BatchLayout
from vllm_steer.taps.tables import Tables

_PREVIOUS, _LATCH, _PROMPT_MEAN, _PROMPT_MAX, _LAST, _MEAN, _MAX, _EMA, _HELD, _PART, _STOP = (
    tl.constexpr(kind)
    for kind in (
        kinds.PREVIOUS, kinds.LATCH, kinds.PROMPT_MEAN, kinds.PROMPT_MAX, kinds.PROMPT_LAST,
        kinds.MEAN, kinds.MAX, kinds.EMA, kinds.HELD, kinds.PART, kinds.STOP,
    )
)  # fmt: skip
_FIELDS, _BOUNDS = tl.constexpr(kinds.CONDITION_FIELDS), tl.constexpr(kinds.BOUND_FIELDS)
_TOKENS, _SCANNED = 128, 32


@triton.jit(do_not_specialize=["requests", "conditions"])  # type: ignore[untyped-decorator, unused-ignore]
def _begin_kernel(  # type: ignore[no-untyped-def]
    slot, start, position, token_id, record, replayed, initial, condition, bound, carry, next_position,
    requests, conditions, columns, most_conditions, most_dropped,
    SEARCH_STEPS: tl.constexpr, COLUMNS: tl.constexpr, SCANNED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    if tl.load(replayed + token) != 0:
        return
    low = tl.zeros([], dtype=tl.int32)
    high = low + requests
    for _ in range(SEARCH_STEPS):
        middle = (low + high) // 2
        before = tl.load(start + middle, mask=middle < requests, other=2147483647) <= token
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    place = tl.load(slot + low).to(tl.int64)
    where = tl.load(position + token)
    begin = tl.load(start + low)
    first = tl.load(position + begin)
    dropped = tl.minimum(tl.maximum(tl.load(next_position + place) - first, 0), most_dropped - 1)
    column = tl.arange(0, COLUMNS)
    values = tl.load(initial + place * columns + column, mask=column < columns, other=0.0)
    for c in range(conditions):
        field = condition + (place * most_conditions + c) * _FIELDS
        kind = tl.load(field)
        applies = (kind >= _PREVIOUS) & (kind < _STOP) & (where >= tl.load(field + 6))
        if applies:
            number = bound + (place * most_conditions + c) * _BOUNDS
            state = tl.load(carry + (place * most_dropped + dropped) * most_conditions + c)
            needed = tl.load(field + 5)
            count = tl.maximum(tl.where(kind == _MEAN, where.to(tl.int32) - tl.load(field + 3), needed), 1)
            score = tl.where((kind == _PROMPT_MEAN) | (kind == _MEAN), state / count, state).to(tl.float32)
            distance = tl.load(number + 1) * (score - tl.load(number))
            sharpness = tl.load(number + 2)
            factor = tl.where(sharpness == 0, (distance > 0).to(tl.float32), tl.sigmoid(sharpness * distance))
            factor = tl.where(kind == _HELD, (state >= needed).to(tl.float32), factor)
            is_empty = (tl.load(field + 8) != 0) & ((state != state) | (state == float("-inf")))
            factor = tl.where(is_empty, 0.0, factor)
            factor = tl.where(kind == _LATCH, state.to(tl.float32), factor)
            if kind == _PART:
                set_at = tl.full([], -1, tl.int32)
                reset_at = tl.full([], -1, tl.int32)
                start_id, end_id = tl.load(field + 1), needed
                break_id, other_break_id = tl.load(field + 9), tl.load(field + 10)
                # The prompt's tokens are behind the state of a new request.
                earliest = tl.maximum(begin, token - (where.to(tl.int32) - tl.load(field + 3)))
                for offset in range(earliest, token, SCANNED):
                    other = offset + tl.arange(0, SCANNED)
                    ids = tl.load(token_id + other, mask=other < token, other=-2)
                    set_at = tl.maximum(set_at, tl.max(tl.where(ids == start_id, other, -1), axis=0))
                    ends = (ids == end_id) | (ids == break_id) | (ids == other_break_id)
                    reset_at = tl.maximum(reset_at, tl.max(tl.where(ends, other, -1), axis=0))
                opened = tl.where(set_at >= reset_at, tl.where(set_at >= 0, 1.0, state.to(tl.float32)), 0.0)
                own = tl.load(token_id + token)
                counts = where >= tl.load(field + 3)
                breaks = ((own == break_id) | (own == other_break_id)) & counts
                inside = tl.where((own == start_id) & counts, 1.0, tl.where(breaks, 0.0, opened))
                factor = tl.where(tl.load(field + 7) != 0, 1.0 - inside, inside)
            values = tl.where(column == tl.load(field + 2), values * factor, values)
    tl.store(record + token.to(tl.int64) * columns + column, values, mask=column < columns)


@triton.jit(do_not_specialize=["conditions"])  # type: ignore[untyped-decorator, unused-ignore]
def _fold_kernel(  # type: ignore[no-untyped-def]
    slot, start, position, token_id, record, replayed, condition, bound, carry, next_position,
    conditions, columns, most_conditions, most_dropped, TOKENS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    place = tl.load(slot + request).to(tl.int64)
    begin, end = tl.load(start + request), tl.load(start + request + 1)
    first_position = tl.load(position + begin)
    dropped_before = tl.minimum(tl.maximum(tl.load(next_position + place) - first_position, 0), most_dropped - 1)
    for c in range(conditions):
        field = condition + (place * most_conditions + c) * _FIELDS
        kind = tl.load(field)
        if kind != 0:
            number = bound + (place * most_conditions + c) * _BOUNDS
            threshold, sign = tl.load(number), tl.load(number + 1)
            release, release_sign = tl.load(number + 3), tl.load(number + 4)
            kept = (1.0 - tl.load(number + 5)).to(tl.float64)
            # The fields of a part are tokens instead of columns.
            score_column = tl.where(kind == _PART, 0, tl.load(field + 1))
            low, high = tl.load(field + 3), tl.load(field + 4)
            mask_column = tl.load(field + 8)
            start_id, end_id = tl.load(field + 1), tl.load(field + 5)
            break_id, other_break_id = tl.load(field + 9), tl.load(field + 10)
            before = tl.load(carry + (place * most_dropped + dropped_before) * most_conditions + c)
            # All warps have read the state before one thread writes it.
            tl.debug_barrier()
            for dropped in range(most_dropped):
                stop = end - dropped
                latest = tl.full([], -1, tl.int32)
                set_at = tl.full([], -1, tl.int32)
                reset_at = tl.full([], -1, tl.int32)
                total = before
                highest = before
                run = before
                average = before
                for offset in range(begin, stop, TOKENS):
                    token = offset + tl.arange(0, TOKENS)
                    real = token < stop
                    where = tl.load(position + token, mask=real, other=-1)
                    computed = tl.load(replayed + token, mask=real, other=1) == 0
                    inside = real & computed & (where >= low) & (where < high)
                    row = record + token.to(tl.int64) * columns
                    folded = tl.load(row + mask_column, mask=real, other=0.0)
                    inside = inside & (tl.where(mask_column == 0, 1.0, folded) != 0)
                    score = tl.load(row + score_column, mask=inside, other=0.0)
                    ids = tl.load(token_id + token, mask=real, other=-2)
                    above = tl.where(ids == start_id, 1.0, 0.0)
                    above = tl.where(kind == _PART, above, sign * (score - threshold))
                    ends = (ids == end_id) | (ids == break_id) | (ids == other_break_id)
                    below = tl.where(ends, 1.0, 0.0)
                    below = tl.where(kind == _PART, below, release_sign * (score - release))
                    holds = inside & (above > 0)
                    released = inside & (below > 0)
                    latest = tl.maximum(latest, tl.max(tl.where(inside, token, -1), axis=0))
                    set_at = tl.maximum(set_at, tl.max(tl.where(holds, token, -1), axis=0))
                    reset_at = tl.maximum(reset_at, tl.max(tl.where(released, token, -1), axis=0))
                    wide = score.to(tl.float64)
                    total += tl.sum(tl.where(inside, wide, 0.0), axis=0)
                    highest = tl.maximum(highest, tl.max(tl.where(inside, wide, float("-inf")), axis=0))
                    broken = tl.max(tl.where(inside & (holds == 0), token, -1), axis=0)
                    after = tl.sum((inside & (token > broken)).to(tl.int32), axis=0).to(tl.float64)
                    run = tl.where(broken >= 0, after, run + after)
                    if kind == _EMA:
                        taken = inside.to(tl.int32)
                        number_taken = tl.sum(taken, axis=0)
                        behind = (number_taken - tl.cumsum(taken, axis=0)).to(tl.float64)
                        earliest = tl.min(tl.where(inside, token, 2147483647), axis=0)
                        at_first = record + tl.where(number_taken > 0, earliest, 0).to(tl.int64) * columns
                        start_score = tl.load(at_first + score_column, mask=number_taken > 0, other=0.0).to(tl.float64)
                        average = tl.where((average != average) & (number_taken > 0), start_score, average)
                        weight = (1.0 - kept) * tl.exp2(behind * tl.log2(kept))
                        average *= tl.exp2(number_taken.to(tl.float64) * tl.log2(kept))
                        average += tl.sum(tl.where(inside, weight * wide, 0.0), axis=0)
                at = record + tl.maximum(latest, 0).to(tl.int64) * columns
                last = tl.load(at + score_column, mask=latest >= 0, other=0.0).to(tl.float64)
                last = tl.where(latest >= 0, last, before)
                latched = tl.where(set_at >= reset_at, tl.where(set_at >= 0, 1.0, before), 0.0)
                state = tl.where((kind == _PREVIOUS) | (kind == _LAST), last, before)
                state = tl.where((kind == _PROMPT_MEAN) | (kind == _MEAN), total, state)
                state = tl.where((kind == _PROMPT_MAX) | (kind == _MAX), highest, state)
                state = tl.where(kind == _EMA, average, state)
                state = tl.where((kind == _LATCH) | (kind == _PART), latched, state)
                state = tl.where((kind == _STOP) | (kind == _HELD), run, state)
                tl.store(carry + (place * most_dropped + dropped) * most_conditions + c, state)
                if kind == _STOP:
                    fires = (latest == stop - 1) & (stop > begin) & (state >= tl.load(field + 5))
                    old = tl.load(at)
                    tl.debug_barrier()
                    tl.store(at, tl.load(field + 7).to(tl.float32), mask=fires & (old == 0))
                    tl.debug_barrier()
    tl.debug_barrier()
    tl.store(next_position + place, tl.load(position + end - 1) + 1)


def launch_begin(tables: Tables, layout: BatchLayout, num_conditions: int) -> None:
    """Run :func:`vllm_steer.taps.records.begin_records` as one kernel."""
    columns = tables.record.shape[1]
    grid: Any = (layout.position.shape[0],)
    _begin_kernel[grid](
        layout.request_slot,
        layout.start,
        layout.position,
        layout.token,
        tables.record,
        tables.replayed,
        tables.initial,
        tables.condition,
        tables.bound,
        tables.carry,
        tables.next_position,
        layout.request_slot.shape[0],
        num_conditions,
        columns,
        tables.condition.shape[1],
        tables.carry.shape[1],
        SEARCH_STEPS=tables.segment_start.shape[0].bit_length() + 1,
        COLUMNS=triton.next_power_of_2(columns),
        SCANNED=_SCANNED,
        num_warps=1,
    )


def launch_fold(tables: Tables, layout: BatchLayout, num_conditions: int) -> None:
    """Run :func:`vllm_steer.taps.records.fold_records` as one kernel."""
    grid: Any = (layout.request_slot.shape[0],)
    _fold_kernel[grid](
        layout.request_slot,
        layout.start,
        layout.position,
        layout.token,
        tables.record,
        tables.replayed,
        tables.condition,
        tables.bound,
        tables.carry,
        tables.next_position,
        num_conditions,
        tables.record.shape[1],
        tables.condition.shape[1],
        tables.carry.shape[1],
        TOKENS=_TOKENS,
        num_warps=4,
    )


def warm_up(tables: Tables) -> None:
    """Compile the kernels, so that the first request with records does not wait for it."""
    zero = torch.zeros(1, dtype=torch.int64, device=tables.device)
    start = torch.tensor([0, 1], dtype=torch.int32, device=tables.device)
    for slot in (zero, zero.int()):
        launch_begin(tables, BatchLayout(slot, start, zero, zero.int()), 1)
        launch_fold(tables, BatchLayout(slot, start, zero, zero.int()), 1)
    tables.record.zero_()
    tables.next_position.zero_()
