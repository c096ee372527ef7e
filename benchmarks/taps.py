# SPDX-License-Identifier: Apache-2.0
"""What taps cost a step of the GPU by themselves: the matrix products of a Llama-8B with taps between them, in a graph.

    python -m benchmarks.taps --out benchmarks/results/gpu-taps.json

Attention is left out; norms and activations are kernels of their own, as the compiler makes them. Variants are replayed
in random order, and what each adds to the graph without taps is the difference of their medians. *Apart*: 96 launches;
*joined*: ``post_block`` of a layer with ``pre_attn`` of the next; with and without programmatic dependent launch, and
without asking the L2 cache to keep the tables.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.shapes import environment
from vllm_steer.config import SteeringConfig
from vllm_steer.program.instructions import ADD
from vllm_steer.taps import tap_kernel
from vllm_steer.taps.tables import Tables

LAYERS, HIDDEN, INNER, QKV = 32, 4096, 14336, 6144
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
BATCHES, ROUNDS = (1, 32, 128, 256), 30
# Row 0: nobody is steered; 1: every site of every token; 2: one site.
TAPS = {"idle": 0, "one busy": 2, "all busy": 1}


class Way(NamedTuple):
    """How the taps are launched."""

    joined: bool
    overlap: bool = True
    hint: str = tap_kernel._CACHE_HINT


VARIANTS: dict[str, Way | None] = {
    "none": None, "apart": Way(False), "joined": Way(True), "apart, no overlap": Way(False, overlap=False),
    "joined, no overlap": Way(True, overlap=False), "apart, no hint": Way(False, hint=""),
    "joined, no hint": Way(True, hint=""),
}  # fmt: skip


def tables_of(tokens: int) -> Tables:
    tables = Tables(
        SteeringConfig(), num_sites=3 * LAYERS, hidden_size=HIDDEN, max_tokens=tokens, max_requests=tokens, dtype=DTYPE,
        device=DEVICE,
    )  # fmt: skip
    sites = torch.arange(3 * LAYERS, dtype=torch.int32, device=DEVICE)
    tables.head[1] = sites + 1
    tables.head[2, 48] = 49
    tables.instruction[1:97, 0], tables.instruction[1:97, 1] = ADD, sites
    tables.parameter[1:97, 0] = 1.0
    tables.vector[:96].normal_(std=1e-3)
    return tables


class Model:
    """The products of the decoder layers, and what stands between them."""

    def __init__(self) -> None:
        shapes = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
        self._weights = [[torch.randn(*s, dtype=DTYPE, device=DEVICE) * 0.01 for s in shapes] for _ in range(LAYERS)]
        self._norm = torch.compile(lambda x, residual: torch.nn.functional.rms_norm(x + residual, (HIDDEN,)))
        self._act = torch.compile(lambda x: torch.nn.functional.silu(x[:, :INNER]) * x[:, INNER:])

    def run(self, x: torch.Tensor, tap: Callable[[int, torch.Tensor, torch.Tensor], None]) -> torch.Tensor:
        """``tap(site, residual, x)`` is called at each site in order."""
        residual = torch.zeros_like(x)
        linear = torch.nn.functional.linear
        for layer, (qkv, out, up, down) in enumerate(self._weights):
            tap(3 * layer, residual, x)
            x = linear(linear(self._norm(x, residual), qkv)[:, :HIDDEN] * 1.0, out)
            tap(3 * layer + 1, residual, x)
            x = linear(self._act(linear(self._norm(x, residual), up)), down)
            tap(3 * layer + 2, residual, x)
        return x + residual


def taps_of(way: Way | None, tables: Tables) -> Callable[[int, torch.Tensor, torch.Tensor], None]:
    """What launches the taps of a step, each called at its site in order."""

    def tap(site: int, residual: torch.Tensor, summand: torch.Tensor) -> None:
        if way is None or (way.joined and site % 3 == 0 and site):
            return
        follows = way.joined and site % 3 == 2 and site + 1 < 3 * LAYERS
        second = tables.head_column(site + 1) if follows else None
        tap_kernel.launch_tap(residual, summand, tables.head_column(site), tables, second)

    return tap


@contextmanager
def launched(way: Way | None) -> Iterator[None]:
    """The kernel is launched that way."""
    real = tap_kernel._overlaps, tap_kernel._CACHE_HINT
    if way is not None:
        tap_kernel._overlaps = lambda device: way.overlap  # type: ignore[assignment]
        tap_kernel._CACHE_HINT = way.hint
    try:
        yield
    finally:
        tap_kernel._overlaps, tap_kernel._CACHE_HINT = real


def captured(model: Model, tables: Tables, x: torch.Tensor, way: Way | None) -> torch.cuda.CUDAGraph:
    """A graph of one step."""
    tap = taps_of(way, tables)
    with launched(way):
        for _ in range(2):
            model.run(x, tap)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model.run(x, tap)
    return graph


def measure(model: Model, tokens: int) -> list[dict[str, Any]]:
    tables, x = tables_of(tokens), torch.randn(tokens, HIDDEN, dtype=DTYPE, device=DEVICE)
    graphs = {name: captured(model, tables, x, way) for name, way in VARIANTS.items()}
    rows = []
    for what, row in TAPS.items():
        tables.token_row.fill_(row)
        tables.head[0] = (tables.head[row] != 0).int() if row else 0
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(ROUNDS):
            for name in random.sample(list(graphs), len(graphs)):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                graphs[name].replay()
                begin.record()
                graphs[name].replay()
                end.record()
                torch.cuda.synchronize()
                times[name].append(1000 * begin.elapsed_time(end))
        median = {name: statistics.median(each) for name, each in times.items()}
        base = median.pop("none")
        added = {name: each - base for name, each in median.items()}
        rows.append({"tokens": tokens, "taps": what, "without_us": base, "added_us": added})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    model = Model()
    rows = [row for tokens in BATCHES for row in measure(model, tokens)]
    arguments.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
