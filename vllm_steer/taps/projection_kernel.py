# SPDX-License-Identifier: Apache-2.0
"""Triton kernel for :mod:`vllm_steer.taps.projection`, the definition, with bfloat16 rows.

Tensor cores multiply bfloat16 numbers without rounding and accumulate in float32. A float32 number has 24 significant
bits and a bfloat16 number 8, so a direction is split into three bfloat16 numbers by truncation. They sum to it exactly,
except for bits below 2^-133, where bfloat16 ends. Three products on tensor cores thus give the float32 product. Rows
are read directly from the arena, and their width is split between programs to occupy the whole GPU.

The result differs from the definition for rows with infinities: all their products are NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from vllm_steer.taps.projection import products_at

_ROWS, _DIRECTIONS, _WIDTH, _PIECE = 64, 16, 64, 256
_MOST_SUMS = 1 << 22
"""Most partial sums, float32, since vLLM leaves little memory."""
_HIGH = tl.constexpr(-(1 << 16))
"""Mask of the bits of a float32 number that bfloat16 keeps."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _truncate(value, FACTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the value truncated to bfloat16, and the remainder."""
    bits = value.to(tl.int32, bitcast=True) & _HIGH
    high = bits.to(tl.float32, bitcast=True)
    return high.to(FACTOR), value - high


@triton.jit(do_not_specialize=["n", "k"])  # type: ignore[untyped-decorator, unused-ignore]
def _products_kernel(  # type: ignore[no-untyped-def]
    stored, places, directions, sums, n, k, hidden,
    HAS_PLACES: tl.constexpr, ROWS: tl.constexpr, DIRECTIONS: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    direction = tl.program_id(1).to(tl.int64) * DIRECTIONS + tl.arange(0, DIRECTIONS)
    piece = tl.program_id(2).to(tl.int64)
    real, wanted = row < n, direction < k
    place = tl.load(places + row, mask=real, other=0) if HAS_PLACES else row
    found = tl.zeros([ROWS, DIRECTIONS], dtype=tl.float32)
    for begin in range(0, PIECE, WIDTH):
        column = piece * PIECE + begin + tl.arange(0, WIDTH)
        inside = column < hidden
        at = place[:, None] * hidden + column[None, :]
        x = tl.load(stored + at, mask=real[:, None] & inside[None, :], other=0.0).to(FACTOR)
        at = direction[None, :] * hidden + column[:, None]
        v = tl.load(directions + at, mask=wanted[None, :] & inside[:, None], other=0.0)
        high, left = _truncate(v, FACTOR)
        middle, left = _truncate(left, FACTOR)
        # Smallest terms first, which rounds least.
        found = tl.dot(x, left.to(FACTOR), found)
        found = tl.dot(x, middle, found)
        found = tl.dot(x, high, found)
    at = (piece * n + row)[:, None] * k + direction[None, :]
    tl.store(sums + at, found, mask=real[:, None] & wanted[None, :])


def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel supports rows of ``dtype`` on this device."""
    return device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 0)


def launch_products(
    stored: torch.Tensor,
    places: torch.Tensor | None,
    directions: torch.Tensor,
    shape: tuple[int, int, int, int] = (_ROWS, _DIRECTIONS, _WIDTH, _PIECE),
) -> torch.Tensor:
    """Run :func:`vllm_steer.taps.projection.products_at` as one kernel, without a sync.

    Args:
        stored: ``[rows, hidden]`` bfloat16, contiguous.
        places: ``[n]`` int64 indices of rows, None for all.
        directions: ``[k, hidden]`` float32.
        shape: Rows, directions and columns of one block, and columns of one program.

    Returns:
        ``[n, k]`` float32.
    """
    rows, width, step, piece = shape
    hidden, k = stored.shape[1], len(directions)
    n = len(stored) if places is None else len(places)
    pieces = triton.cdiv(hidden, piece)
    if n == 0 or k == 0 or pieces * n * k > _MOST_SUMS:
        return products_at(stored, places, directions)
    sums = torch.empty((pieces, n, k), dtype=torch.float32, device=stored.device)
    grid: Any = (triton.cdiv(n, rows), triton.cdiv(k, width), pieces)
    _products_kernel[grid](
        stored,
        stored if places is None else places,
        directions,
        sums,
        n,
        k,
        hidden,
        HAS_PLACES=places is not None,
        ROWS=rows,
        DIRECTIONS=width,
        WIDTH=step,
        PIECE=piece,
        # Triton's interpreter multiplies bfloat16 numbers as integers.
        FACTOR=tl.float32 if knobs.runtime.interpret else tl.bfloat16,
        num_warps=4,
    )
    return sums[0] if pieces == 1 else sums.sum(0)


def warm_up(arena: torch.Tensor) -> None:
    """Compile the kernel, so that the first projected request does not wait for it."""
    rows, directions = arena[:1], torch.zeros(1, arena.shape[1], device=arena.device)
    for places in (None, torch.zeros(1, dtype=torch.int64, device=arena.device)):
        launch_products(rows, places, directions)
