# SPDX-License-Identifier: Apache-2.0
"""Compare methods to multiply captured rows with directions: the definition, the engine's kernel, and others.

    python -m benchmarks.products --out benchmarks/results/gpu-products.json
    TRITON_INTERPRET=1 python -m benchmarks.products --check     # on a CPU: compare the results only

Results are median microseconds of GPU time for bfloat16 rows of width 4,096 and float32 directions. The number of
directions is the number of probes in a request.

* *definition*: :func:`vllm_steer.taps.projection.products`.
* *matrix product*: one float32 matrix product.
* *matrix product of thirds*: each float32 component is split into three bfloat16 numbers, for tensor cores.
* *kernel*: the engine's kernel for bfloat16 models, which splits too. Its shape is rows, directions and columns per
  iteration, and columns per piece.
* *float32 by row*, *float32 by column*: kernels that multiply the float32 directions without a split. Directions are
  stored as ``[k, hidden]``, or transposed for coalesced reads.

A method with an error above that of float32 ends the benchmark.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from benchmarks.shapes import environment
from vllm_steer.taps.projection import products
from vllm_steer.taps.projection_kernel import launch_products

HIDDEN, REPEATS = 4096, 30
SIZES = ((4, 16), (128, 16), (1024, 1), (1024, 16), (1024, 64))
SHAPES = (
    (64, 16, 64, 256), (64, 16, 64, 512), (64, 16, 128, 256), (64, 32, 64, 256), (64, 64, 64, 256), (128, 16, 64, 256),
    (32, 16, 64, 256), (16, 16, 64, 256),
)  # fmt: skip
"""Shapes of the engine's kernel; the engine uses the first one."""
FLOAT_SHAPES = ((16, 16, 64, 256), (32, 16, 64, 512), (64, 16, 64, 256))
MAX_ERROR = 1e-6
"""Relative to the sum of a product's absolute terms. The error of float32 is smaller, that of TF32 larger."""


Method: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@triton.jit(do_not_specialize=["n", "k"])  # type: ignore[untyped-decorator, unused-ignore]
def float_kernel(  # type: ignore[no-untyped-def]
    rows, directions, sums, n, k, hidden, along, across,
    ROWS: tl.constexpr, DIRECTIONS: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    direction = tl.program_id(1).to(tl.int64) * DIRECTIONS + tl.arange(0, DIRECTIONS)
    piece = tl.program_id(2).to(tl.int64)
    real, wanted = row < n, direction < k
    found = tl.zeros([ROWS, DIRECTIONS], dtype=tl.float32)
    for begin in range(0, PIECE, WIDTH):
        column = piece * PIECE + begin + tl.arange(0, WIDTH)
        inside = column < hidden
        at = row[:, None] * hidden + column[None, :]
        x = tl.load(rows + at, mask=real[:, None] & inside[None, :], other=0.0)
        at = column[:, None] * along + direction[None, :] * across
        v = tl.load(directions + at, mask=inside[:, None] & wanted[None, :], other=0.0)
        # "ieee" avoids tensor cores, which would round the directions.
        found = tl.dot(x.to(tl.float32), v, found, input_precision="ieee")
    at = (piece * n + row)[:, None] * k + direction[None, :]
    tl.store(sums + at, found, mask=real[:, None] & wanted[None, :])


def by_float_kernel(shape: tuple[int, int, int, int], by_column: bool) -> Method:
    """Return a method over ``directions[k, hidden]``, or with ``by_column`` over ``directions[hidden, k]``."""
    height, width, step, piece = shape

    def multiply(rows: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
        n, hidden = rows.shape
        along, across = directions.stride() if by_column else directions.T.stride()
        k = directions.shape[by_column]
        pieces = triton.cdiv(hidden, piece)
        sums = torch.empty((pieces, n, k), dtype=torch.float32, device=rows.device)
        grid: Any = (triton.cdiv(n, height), triton.cdiv(k, width), pieces)
        float_kernel[grid](
            rows, directions, sums, n, k, hidden, along, across,
            ROWS=height, DIRECTIONS=width, WIDTH=step, PIECE=piece, num_warps=4,
        )  # fmt: skip
        return sums.sum(0)

    return multiply


def multiply_thirds(rows: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """Multiply with directions split into thirds. Includes the split: four small kernels that a cache could save."""
    high = directions.bfloat16()
    rest = directions - high.float()
    middle = rest.bfloat16()
    low = (rest - middle.float()).bfloat16()
    parts = torch.mm(rows, torch.cat((low, middle, high)).T, out_dtype=torch.float32)
    return parts.view(len(rows), 3, len(directions)).sum(1)


def methods() -> dict[str, tuple[bool, Method]]:
    """Return the methods by name, each with whether it takes the directions as ``[hidden, k]``."""
    found: dict[str, tuple[bool, Method]] = {
        "definition": (False, products),
        "matrix product": (False, lambda rows, directions: rows.float() @ directions.T),
    }
    if torch.cuda.is_available():
        found["matrix product of thirds"] = (False, multiply_thirds)
    for shape in SHAPES:
        found[f"kernel {', '.join(map(str, shape))}"] = (
            False, lambda rows, directions, shape=shape: launch_products(rows, None, directions, shape),
        )  # fmt: skip
    for shape in FLOAT_SHAPES:
        for by_column in (False, True):
            name = f"float32 by {'column' if by_column else 'row'} {', '.join(map(str, shape))}"
            found[name] = (by_column, by_float_kernel(shape, by_column))
    return found


def relative_error(found: torch.Tensor, rows: torch.Tensor, directions: torch.Tensor) -> float:
    """Return the largest error relative to the sum of a product's absolute terms; infinity if any result is NaN."""
    expected, terms = rows.double() @ directions.double().T, rows.double().abs() @ directions.double().abs().T
    return float(((found - expected).abs() / terms).nan_to_num(nan=torch.inf).max())


def measure_microseconds(multiply: Callable[[], torch.Tensor]) -> float:
    """Return the median GPU time of one call, measured in a CUDA graph so that host time does not count."""
    multiply()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            multiply()
    spent = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent.append(1000 * begin.elapsed_time(end) / REPEATS)
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true", help="compare the results only, on a CPU")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.check else "cuda")
    sizes, hidden = (((5, 3), (33, 17)), 600) if arguments.check else (SIZES, HIDDEN)
    found: dict[str, dict[str, float]] = {}
    for n, k in sizes:
        rows = torch.randn(n, hidden, device=device).bfloat16()
        directions = torch.randn(k, hidden, device=device)
        columns = directions.T.contiguous()
        for name, (by_column, multiply) in methods().items():
            given = columns if by_column else directions
            error = relative_error(multiply(rows, given), rows, directions)
            if not error < MAX_ERROR:
                raise SystemExit(f"{name}, {n} rows, {k} directions: relative error {error:.1e}")
            if not arguments.check:
                spent = measure_microseconds(functools.partial(multiply, rows, given))
                found.setdefault(name, {})[f"{n} x {k}"] = spent
                print(f"{name}, {n} rows, {k} directions: {spent:.1f}", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps({"environment": environment(), "microseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
