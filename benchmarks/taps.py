# SPDX-License-Identifier: Apache-2.0
"""Measure the GPU time of taps alone, in a CUDA graph of the matrix products of a Llama-8B step.

    python -m benchmarks.taps --out benchmarks/results/gpu-taps.json

The graph has no attention. Norms and activations are separate kernels, as the compiler generates them. The variants are
replayed in random order; the time that a variant adds is the difference of its median and the median without taps.

* *apart*: 96 launches.
* *joined*: ``post_block`` of a layer and ``pre_attn`` of the next layer share a launch.
* *no overlap*: without programmatic dependent launch.
* *no hint*: without the hint to keep the tables in the L2 cache.
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
# Table row of all tokens. Row 0 has no edits, row 1 an edit at every site, row 2 an edit at one site.
TAPS = {"idle": 0, "one busy": 2, "all busy": 1}


class LaunchOptions(NamedTuple):
    """Options of the launches of taps."""

    joined: bool
    overlap: bool = True
    hint: str = tap_kernel._CACHE_HINT


VARIANTS: dict[str, LaunchOptions | None] = {
    "none": None,
    "apart": LaunchOptions(False),
    "joined": LaunchOptions(True),
    "apart, no overlap": LaunchOptions(False, overlap=False),
    "joined, no overlap": LaunchOptions(True, overlap=False),
    "apart, no hint": LaunchOptions(False, hint=""),
    "joined, no hint": LaunchOptions(True, hint=""),
}


def make_tables(tokens: int) -> Tables:
    tables = Tables(
        SteeringConfig(), num_sites=3 * LAYERS, hidden_size=HIDDEN, max_tokens=tokens, max_requests=tokens, dtype=DTYPE,
        device=DEVICE,
    )  # fmt: skip
    sites = torch.arange(3 * LAYERS, dtype=torch.int32, device=DEVICE)
    tables.head[1, list(tables.head_index)] = sites + 1
    tables.head_column(48)[2] = 49
    tables.instruction[1:97, 0], tables.instruction[1:97, 1] = ADD, sites
    tables.parameter[1:97, 0] = 1.0
    tables.vector[:96].normal_(std=1e-3)
    return tables


class Model:
    """Matrix products of the decoder layers, with the norms and activations between them."""

    def __init__(self) -> None:
        shapes = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
        self._weights = [[torch.randn(*s, dtype=DTYPE, device=DEVICE) * 0.01 for s in shapes] for _ in range(LAYERS)]
        self._norm = torch.compile(lambda x, residual: torch.nn.functional.rms_norm(x + residual, (HIDDEN,)))
        self._act = torch.compile(lambda x: torch.nn.functional.silu(x[:, :INNER]) * x[:, INNER:])

    def run(self, x: torch.Tensor, tap: Callable[[int, torch.Tensor, torch.Tensor], None]) -> torch.Tensor:
        """Run a step and call ``tap(site, residual, x)`` at each site in order."""
        residual = torch.zeros_like(x)
        linear = torch.nn.functional.linear
        for layer, (qkv, out, up, down) in enumerate(self._weights):
            tap(3 * layer, residual, x)
            x = linear(linear(self._norm(x, residual), qkv)[:, :HIDDEN] * 1.0, out)
            tap(3 * layer + 1, residual, x)
            x = linear(self._act(linear(self._norm(x, residual), up)), down)
            tap(3 * layer + 2, residual, x)
        return x + residual


def make_tap(options: LaunchOptions | None, tables: Tables) -> Callable[[int, torch.Tensor, torch.Tensor], None]:
    """Return the function that launches the tap of a site; call it for each site of a step in order."""

    def tap(site: int, residual: torch.Tensor, summand: torch.Tensor) -> None:
        if options is None or (options.joined and site % 3 == 0 and site):
            return
        follows = options.joined and site % 3 == 2 and site + 1 < 3 * LAYERS
        second = tables.head_column(site + 1) if follows else None
        tap_kernel.launch_tap(residual, summand, tables.head_column(site), tables, second)

    return tap


@contextmanager
def use_options(options: LaunchOptions | None) -> Iterator[None]:
    """Launch the kernel with these options."""
    real = tap_kernel._overlaps, tap_kernel._CACHE_HINT
    if options is not None:
        tap_kernel._overlaps = lambda device: options.overlap  # type: ignore[assignment]
        tap_kernel._CACHE_HINT = options.hint
    try:
        yield
    finally:
        tap_kernel._overlaps, tap_kernel._CACHE_HINT = real


def capture_graph(model: Model, tables: Tables, x: torch.Tensor, options: LaunchOptions | None) -> torch.cuda.CUDAGraph:
    """Return a graph of one step."""
    tap = make_tap(options, tables)
    with use_options(options):
        for _ in range(2):
            model.run(x, tap)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model.run(x, tap)
    return graph


def measure(model: Model, tokens: int) -> list[dict[str, Any]]:
    tables, x = make_tables(tokens), torch.randn(tokens, HIDDEN, dtype=DTYPE, device=DEVICE)
    graphs = {name: capture_graph(model, tables, x, options) for name, options in VARIANTS.items()}
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
