# SPDX-License-Identifier: Apache-2.0
"""Ways to make the products of a step's captured rows with directions: the definition, the engine's kernel, and others.

    python -m benchmarks.products --out benchmarks/results/gpu-products.json
    TRITON_INTERPRET=1 python -m benchmarks.products --check     # on a CPU: that all ways agree

Microseconds of the GPU for bfloat16 rows 4,096 wide and float32 directions, medians of graphs of one call each; the
directions are as many as a request's probes. *Definition* is :func:`vllm_steer.taps.projection.products`; *matrix
product* undivided. *Thirds* are three bfloat16 numbers whose sum is the direction's float32 number, for tensor cores;
with them, *kernel* is what the engine launches for bfloat16 models, in several shapes: rows, directions and columns at
a time, and a piece's columns. *Float32 kernels* multiply the directions as they are: *by row* as they are gathered, *by
column* as they would be if they were kept transposed, so that threads beside each other read numbers beside each other.
No way counts whose products are off by more than float32 is.
"""

from __future__ import annotations

import argparse
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
"""Of the engine's kernel, which has the first one."""
FLOAT_SHAPES = ((16, 16, 64, 256), (32, 16, 64, 512), (64, 16, 64, 256))
OFF_BY = 1e-6
"""Of the sum of a product's absolute terms: float32 is off by less, TF32 by more."""


Way: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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
        # In float32 as it is ("ieee"): tensor cores would round the directions.
        found = tl.dot(x.to(tl.float32), v, found, input_precision="ieee")
    at = (piece * n + row)[:, None] * k + direction[None, :]
    tl.store(sums + at, found, mask=real[:, None] & wanted[None, :])


def by_float_kernel(shape: tuple[int, int, int, int], by_column: bool) -> Way:
    """``directions`` are ``[k, hidden]``, or with ``by_column`` ``[hidden, k]``."""
    height, width, step, piece = shape

    def make(rows: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
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

    return make


def of_thirds(rows: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """Their making is counted: four small kernels, which an engine could save by keeping them."""
    high = directions.bfloat16()
    left = directions - high.float()
    middle = left.bfloat16()
    low = (left - middle.float()).bfloat16()
    parts = torch.mm(rows, torch.cat((low, middle, high)).T, out_dtype=torch.float32)
    return parts.view(len(rows), 3, len(directions)).sum(1)


def ways() -> dict[str, tuple[bool, Way]]:
    """By name: whether the directions are ``[hidden, k]``, and what makes the products."""
    found: dict[str, tuple[bool, Way]] = {
        "definition": (False, products),
        "matrix product": (False, lambda rows, directions: rows.float() @ directions.T),
    }
    if torch.cuda.is_available():
        found["matrix product of thirds"] = (False, of_thirds)
    for shape in SHAPES:
        found[f"kernel {', '.join(map(str, shape))}"] = (
            False, lambda rows, directions, shape=shape: launch_products(rows, None, directions, shape),
        )  # fmt: skip
    for shape in FLOAT_SHAPES:
        for by_column in (False, True):
            name = f"float32 by {'column' if by_column else 'row'} {', '.join(map(str, shape))}"
            found[name] = (by_column, by_float_kernel(shape, by_column))
    return found


def off_by(found: torch.Tensor, rows: torch.Tensor, directions: torch.Tensor) -> float:
    """As a share of the sum of a product's absolute terms, at most; infinite where something is not a number."""
    right, terms = rows.double() @ directions.double().T, rows.double().abs() @ directions.double().abs().T
    return float(((found - right).abs() / terms).nan_to_num(nan=torch.inf).max())


def microseconds(make: Callable[[], torch.Tensor]) -> float:
    """Of the GPU, for one call, in a graph: nothing of the host is in it."""
    make()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            make()
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
    parser.add_argument("--check", action="store_true", help="compare only, on a CPU")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.check else "cuda")
    sizes, hidden = (((5, 3), (33, 17)), 600) if arguments.check else (SIZES, HIDDEN)
    found: dict[str, dict[str, float]] = {}
    for n, k in sizes:
        rows = torch.randn(n, hidden, device=device).bfloat16()
        directions = torch.randn(k, hidden, device=device)
        columns = directions.T.contiguous()
        for name, (by_column, make) in ways().items():
            given = columns if by_column else directions
            off = off_by(make(rows, given), rows, directions)
            if not off < OFF_BY:
                raise SystemExit(f"{name}, {n} rows, {k} directions: off by {off:.1e}")
            if not arguments.check:
                spent = microseconds(lambda make=make, rows=rows, given=given: make(rows, given))  # type: ignore[misc]
                found.setdefault(name, {})[f"{n} x {k}"] = spent
                print(f"{name}, {n} rows, {k} directions: {spent:.1f}", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps({"environment": environment(), "microseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
