# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for :func:`vllm_steer.taps.heads.record_top_k`, which is the definition.

The first kernel reads the products once, in their own dtype. Each program computes the outputs of one block of a row
and keeps the largest as sortable integers: the bits of an output in the upper half, the complement of its index in the
lower half, so that of equal outputs the first one counts. The second kernel merges the blocks of a row and writes the
record.

The definition may choose another index among equal outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_steer.taps.heads import Activation, Head, Places, record_top_k

MOST = 16
"""Largest ``k`` of the kernels. Each output costs a pass over the block, so the definition handles larger ones."""
_BLOCK = 4096
_NONE = tl.constexpr(-(1 << 63))
_LOW = tl.constexpr((1 << 32) - 1)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _flip(bits):  # type: ignore[no-untyped-def]
    """Map the bits of float32 numbers to integers of the same order, and back."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit(do_not_specialize=["k", "blocks"])  # type: ignore[untyped-decorator, unused-ignore]
def _blocks_kernel(  # type: ignore[no-untyped-def]
    products, bias, threshold, scale, magnitude_bias, found, highest, total, stride, outputs, k, blocks,
    LOGITS: tl.constexpr, THRESHOLD: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    inside = index < outputs
    x = tl.load(products + row * stride + index, mask=inside, other=float("-inf")).to(tl.float32)
    at = row * blocks + block
    if LOGITS:
        high = tl.max(x, axis=0)
        tl.store(highest + at, high)
        tl.store(total + at, tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - high)), axis=0))
    else:
        before = x + tl.load(bias + index, mask=inside, other=0.0)
        if GATED:
            magnitude = x * tl.load(scale + index, mask=inside, other=0.0)
            magnitude = tl.maximum(magnitude + tl.load(magnitude_bias + index, mask=inside, other=0.0), 0.0)
            x = tl.where(before > 0, magnitude, 0.0)
        else:
            x = tl.maximum(before, 0.0)
            if THRESHOLD:
                x = tl.where(before > tl.load(threshold + index, mask=inside, other=0.0), x, 0.0)
    key = (_flip(x.to(tl.int32, bitcast=True)).to(tl.int64) << 32) | (index.to(tl.int64) ^ _LOW)
    key = tl.where(inside, key, _NONE)
    for place in range(k):
        best = tl.max(key, axis=0)
        tl.store(found + at * k + place, best)
        key = tl.where(key == best, _NONE, key)


@triton.jit(do_not_specialize=["k", "blocks", "kept_outputs", "record_columns"])  # type: ignore[untyped-decorator, unused-ignore]
def _merge_kernel(  # type: ignore[no-untyped-def]
    found, highest, total, record, token, first_column, kept, k, blocks, kept_outputs, record_columns,
    LOGITS: tl.constexpr, BLOCKS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(kept + row) != 0:
        return
    candidate = tl.arange(0, CANDIDATES)
    key = tl.load(found + row * blocks * k + candidate, mask=candidate < blocks * k, other=_NONE)
    shift = 0.0
    if LOGITS:
        block = tl.arange(0, BLOCKS)
        high = tl.load(highest + row * blocks + block, mask=block < blocks, other=float("-inf"))
        each = tl.load(total + row * blocks + block, mask=block < blocks, other=0.0)
        top = tl.max(high, axis=0)
        shift = top + tl.log(tl.sum(tl.where(high == float("-inf"), 0.0, each * tl.exp(high - top)), axis=0))
    own = record + tl.load(token + row) * record_columns + tl.load(first_column + row)
    for place in range(k):
        best = tl.max(key, axis=0)
        key = tl.where(key == best, _NONE, key)
        index = ((best & _LOW) ^ _LOW).to(tl.int32)
        value = _flip((best >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        if LOGITS:
            value -= shift
        else:
            value = tl.where((kept_outputs > 0) & (place >= kept_outputs), 0.0, value)
            index = tl.where(value > 0, index, -1)
        tl.store(own + place, index.to(tl.float32))
        tl.store(own + k + place, value)


def launch_top_k(
    record: torch.Tensor, places: Places, products: torch.Tensor, activation: Activation | None, k: int
) -> None:
    """Run :func:`vllm_steer.taps.heads.record_top_k` as two kernels, without a sync.

    Args:
        record: ``[tokens, columns]`` float32.
        places: Where the rows are recorded.
        products: ``[rows, outputs]``, contiguous within a row.
        activation: The head's activation, None for log-probabilities.
        k: Number of outputs.
    """
    rows, outputs = products.shape
    if k > MOST or products.stride(1) != 1:
        record_top_k(record, places, products, activation, k)
        return
    if rows == 0:
        return
    blocks = triton.cdiv(outputs, _BLOCK)
    found = torch.empty((rows, blocks, k), dtype=torch.int64, device=products.device)
    # Maxima and sums of exponentials, of logits only.
    sums = torch.empty((2, rows, blocks), dtype=torch.float32, device=products.device)
    given = Activation(products) if activation is None else activation
    unused = given.bias
    block_grid: Any = (rows, blocks)
    row_grid: Any = (rows,)
    _blocks_kernel[block_grid](
        products,
        given.bias,
        unused if given.threshold is None else given.threshold,
        unused if given.scale is None else given.scale,
        unused if given.magnitude_bias is None else given.magnitude_bias,
        found,
        sums[0],
        sums[1],
        products.stride(0),
        outputs,
        k,
        blocks,
        LOGITS=activation is None,
        THRESHOLD=given.threshold is not None,
        GATED=given.scale is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    _merge_kernel[row_grid](
        found,
        sums[0],
        sums[1],
        record,
        places.token,
        places.column,
        places.kept,
        k,
        blocks,
        given.kept,
        record.shape[1],
        LOGITS=activation is None,
        BLOCKS=triton.next_power_of_2(blocks),
        CANDIDATES=triton.next_power_of_2(blocks * MOST),
        num_warps=4,
    )


def warm_up(head: Head, dtype: torch.dtype, device: torch.device, hidden: int) -> None:
    """Compile the kernels for a head, so that the first request that reads it does not wait for them.

    All tensor-parallel ranks call this, since a head may be collective.

    Args:
        head: The head.
        dtype: The model's dtype.
        device: The tables' device.
        hidden: Width of the stream.
    """
    products = head.products(torch.zeros(2, hidden, dtype=dtype, device=device))
    if products is None:
        return
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    record = torch.zeros(1, 2, device=device)
    # Rows of an odd width are aligned alternately.
    for row in (products[:1], products[1:]):
        launch_top_k(record, Places(zero, zero, zero.bool()), row, head.activation, 1)
