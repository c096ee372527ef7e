# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of the tap; :mod:`vllm_steer.taps.reference` is the definition.

The kernel has one program per token, which returns early if the token's row has no instructions at the site. One launch
can serve two adjacent sites, since most of a tap's cost is its launch. Arithmetic is float32, with one rounding when
the stream is written.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_steer.program import instructions as ops
from vllm_steer.program.position_runs import NO_OPERAND
from vllm_steer.taps.tables import Tables

_ADD, _ADD_NORMED, _ABLATE = (tl.constexpr(code) for code in (ops.ADD, ops.ADD_NORMED, ops.ABLATE))
_REPLACE, _REPLACE_AT, _SET_AT = (tl.constexpr(code) for code in (ops.REPLACE, ops.REPLACE_AT, ops.SET_AT))
_FEATURE, _MEASURE = tl.constexpr(ops.FEATURE), tl.constexpr(ops.MEASURE)
_NO_OPERAND = tl.constexpr(NO_OPERAND)
_CAPTURE, _READ, _GATE = (tl.constexpr(code) for code in (ops.CAPTURE, ops.READ, ops.GATE))
_CACHE_HINT = "evict_last"
"""Cache policy of the tables. A tap's small loads depend on one another, and between two taps of a step the weights of
half a layer pass through the L2 cache."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _fetch(instruction, parameter, vector, index, hidden, column, HINT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load code, operand, successor, columns, strength and vector of an instruction, or zeros for instruction 0."""
    record, real = index.to(tl.int64) * 4, index != 0
    code = tl.load(instruction + record, mask=real, other=0, eviction_policy=HINT)
    which = tl.load(instruction + record + 1, mask=real, other=0, eviction_policy=HINT).to(tl.int64)
    following = tl.load(instruction + record + 2, mask=real, other=0, eviction_policy=HINT)
    columns = tl.load(instruction + record + 3, mask=real, other=0, eviction_policy=HINT)
    strength = tl.load(parameter + record, mask=real, other=0.0, eviction_policy=HINT)
    # CAPTURE and GATE have no vector.
    width = tl.where(real & (code != _CAPTURE) & (code != _GATE), hidden, 0)
    v = tl.load(vector + which * hidden + column, mask=column < width, other=0.0)
    return code, which, following, columns, strength, v


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _operand(operand, numbers, offset, HINT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the operand of a token in the run of an instruction with the parameters ``numbers``."""
    first = tl.load(numbers + 3, eviction_policy=HINT).to(tl.int64)
    return tl.load(operand + first + tl.load(offset))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tap_kernel(  # type: ignore[no-untyped-def]
    target, other, head, second, token_row, instruction, parameter, vector, operand, token_offset, token_base, arena,
    record, replayed, target_stride, other_stride, head_stride, hidden, arena_rows, record_columns,
    HAS_OTHER: tl.constexpr, HAS_SECOND: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
    HINT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    # Row 0 of a head counts the rows that use the site. It is loaded together with the token's row, not after it.
    users = tl.load(head, eviction_policy=HINT)
    later_users = users
    if HAS_SECOND:
        later_users = tl.load(second, eviction_policy=HINT)
    row = tl.load(token_row + token, eviction_policy=HINT)
    if (users | later_users) == 0:
        if OVERLAP:
            # The next kernel waits only for this one, so this one must not end before the previous one.
            tl.extra.cuda.gdc_wait()
        return
    first = row.to(tl.int64) * head_stride
    current = tl.load(head + first, mask=(row != 0) & (users != 0), other=0, eviction_policy=HINT)
    later = 0
    if HAS_SECOND:
        later = tl.load(second + first, mask=(row != 0) & (later_users != 0), other=0, eviction_policy=HINT)
        alone = current == 0
        current = tl.where(alone, later, current)
        later = tl.where(alone, 0, later)
    # The forward pass does not write instructions and vectors, so they are loaded before the previous kernel ends.
    code, which, following, columns, strength, v = _fetch(instruction, parameter, vector, current, hidden, column, HINT)
    if HAS_SECOND:
        later_code, later_which, later_following, later_columns, later_strength, later_v = _fetch(
            instruction, parameter, vector, later, hidden, column, HINT
        )
    if OVERLAP:
        # Wait for the previous kernel, which writes the stream.
        tl.extra.cuda.gdc_wait()
    if current == 0:
        return
    place = target + token * target_stride + column
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if HAS_OTHER:
        beside = other + token * other_stride + column
        x += tl.load(beside, mask=inside, other=0.0).to(tl.float32)
    # Whether an edit has changed the stream: other tokens are not written.
    edited = False
    # Activation of the feature that the next FEATURE sets.
    activation = tl.zeros([], dtype=tl.float32)
    while current != 0:
        if code == _CAPTURE:
            stored = tl.load(token_base + token, eviction_policy=HINT) + which
            if stored < arena_rows:
                rounded = x.to(target.dtype.element_ty)
                tl.store(arena + stored * hidden + column, rounded.to(arena.dtype.element_ty), mask=inside)
        elif code == _MEASURE:
            numbers = parameter + current.to(tl.int64) * 4
            activation = tl.sum(x * v, axis=0) + tl.load(numbers + 1, eviction_policy=HINT)
            activation = tl.where(activation > tl.load(numbers + 2, eviction_policy=HINT), activation, 0.0)
        elif (code == _READ) | (code == _GATE):
            own = record + token * record_columns
            numbers = parameter + current.to(tl.int64) * 4
            second_number = tl.load(numbers + 1)
            # Threads of other warps read what one thread writes, so each access is between two barriers.
            tl.debug_barrier()
            computed = tl.load(replayed + token) == 0
            if code == _READ:
                # The model goes on with this row.
                seen = x.to(target.dtype.element_ty).to(tl.float32)
                score = tl.sum(seen * v, axis=0)
                if second_number >= 2.0:
                    length = tl.sqrt(tl.sum(seen * seen, axis=0)) * tl.sqrt(tl.sum(v * v, axis=0))
                    score = tl.where(length == 0, 0.0, score / length)
                score += strength
                score = tl.where((second_number == 1.0) | (second_number == 3.0), tl.sigmoid(score), score)
                tl.store(own + columns, score, mask=computed)
            else:
                distance = second_number * (tl.load(own + (columns & 0xFFFF)) - strength)
                sharpness = tl.load(numbers + 2)
                factor = tl.where(sharpness == 0, (distance > 0).to(tl.float32), tl.sigmoid(sharpness * distance))
                scaled = tl.load(own + (columns >> 16)) * factor
                tl.debug_barrier()
                tl.store(own + (columns >> 16), scaled, mask=computed)
            tl.debug_barrier()
        else:
            if columns != 0:
                own = record + token * record_columns
                one, two = columns & 0xFFFF, columns >> 16
                strength *= tl.load(own + one, mask=one != 0, other=1.0) * tl.load(own + two, mask=two != 0, other=1.0)
            numbers = parameter + current.to(tl.int64) * 4
            if (code == _REPLACE) | (code == _REPLACE_AT):
                covered = code == _REPLACE
                if code == _REPLACE_AT:
                    value = _operand(operand, numbers, token_offset + token, HINT)
                    covered = value != _NO_OPERAND
                    place_of_row = tl.maximum(value, 0).to(tl.int64) * hidden
                    v = tl.load(vector + place_of_row + column, mask=inside, other=0.0)
                if covered:
                    x = tl.where(strength < 0.5, x + strength * (v - x), v - (1.0 - strength) * (v - x))
                    edited = edited | (strength != 0.0)
            else:
                if code == _ADD:
                    amount = strength
                elif code == _FEATURE:
                    amount = strength * (tl.load(numbers + 1, eviction_policy=HINT) - activation)
                elif code == _ADD_NORMED:
                    amount = strength * tl.sqrt(tl.sum(x * x, axis=0))
                else:
                    along = tl.sum(x * v, axis=0)
                    if code == _ABLATE:
                        amount = -strength * along
                    elif code == _SET_AT:
                        value = _operand(operand, numbers, token_offset + token, HINT)
                        component = value.to(tl.float32, bitcast=True)
                        amount = tl.where(value != _NO_OPERAND, strength * (component - along), 0.0)
                    else:
                        low = tl.load(numbers + 1, eviction_policy=HINT)
                        high = tl.load(numbers + 2, eviction_policy=HINT)
                        amount = strength * (tl.minimum(tl.maximum(along, low), high) - along)
                x += amount * v
                edited = edited | (amount != 0.0)
        current = following
        if HAS_SECOND:
            if (current == 0) & (later != 0):
                # The second site reads the rounded output of the first.
                if edited:
                    x = x.to(target.dtype.element_ty).to(tl.float32)
                current = later
                later = 0
                code, which, following, strength = later_code, later_which, later_following, later_strength
                v, columns = later_v, later_columns
            elif current != 0:
                code, which, following, columns, strength, v = _fetch(
                    instruction, parameter, vector, current, hidden, column, HINT
                )
        elif current != 0:
            code, which, following, columns, strength, v = _fetch(
                instruction, parameter, vector, current, hidden, column, HINT
            )
    if edited:
        # One summand holds the whole stream, so that the model's addition of both rounds nothing.
        tl.store(place, x.to(target.dtype.element_ty), mask=inside)
        if HAS_OTHER:
            tl.store(beside, tl.zeros([BLOCK], other.dtype.element_ty), mask=inside)


@cache
def _overlaps(device: torch.device) -> bool:
    """Return whether the device supports programmatic dependent launch (compute capability 9.0 and later).

    It starts a kernel while the previous one still runs. Most of the cost of an idle tap is the gap between kernels.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_tap(
    target: torch.Tensor,
    other: torch.Tensor | None,
    head: torch.Tensor,
    tables: Tables,
    second: torch.Tensor | None = None,
) -> None:
    """Run :func:`vllm_steer.taps.reference.apply_tap` as one kernel, without a sync or an allocation.

    Args:
        target: ``[tokens, hidden]`` with contiguous rows in bf16, fp16 or fp32, hidden at most 65,536.
        other: The stream's second summand, None if ``target`` is the whole stream.
        head: First instructions of the site's rows.
        tables: The rank's device tables.
        second: First instructions of an adjacent site, which run after the instructions in ``head``.
    """
    tokens, hidden = target.shape
    if tokens == 0:
        return
    block = triton.next_power_of_2(hidden)
    # The kernel ahead of a tap in the first layer may be the one that writes the rows of the step, as in a pipeline
    # stage or with given embeddings. Other taps have a kernel of the model between them and it, which waits for it.
    overlap = _overlaps(target.device) and not tables.is_in_first_layer(head)
    grid: Any = (tokens,)
    _tap_kernel[grid](
        target,
        target if other is None else other,
        head,
        head if second is None else second,
        tables.token_row,
        tables.instruction,
        tables.parameter,
        tables.vector,
        tables.operand,
        tables.token_offset,
        tables.token_base,
        tables.arena,
        tables.record,
        tables.replayed,
        target.stride(0),
        0 if other is None else other.stride(0),
        head.stride(0),
        hidden,
        tables.arena.shape[0],
        tables.record.shape[1],
        HAS_OTHER=other is not None,
        HAS_SECOND=second is not None,
        BLOCK=block,
        OVERLAP=overlap,
        HINT=_CACHE_HINT,
        num_warps=max(1, min(16, block // 512)),
        **({"launch_pdl": True} if overlap else {}),
    )


def warm_up(tables: Tables, dtype: torch.dtype) -> None:
    """Compile the kernel in all its variants, so that the first request with a program does not wait for it."""
    target = torch.zeros(1, tables.vector.shape[1], dtype=dtype, device=tables.device)
    for head in (tables.head_column(0), tables.head_column(tables.num_sites - len(tables.points))):
        for other in (None, target):
            for second in (None, head):
                launch_tap(target, other, head, tables, second)
