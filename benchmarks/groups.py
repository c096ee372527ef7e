# SPDX-License-Identifier: Apache-2.0
"""Groups of measurements for ``benchmarks/cost.py``, which together provide every figure of the performance page.

An H200 has 140 GiB. All engines of the selected groups start together and keep running. A pair needs twice the memory
of its weights and caches, plus some 3 GiB for graphs. Groups of one shape with equal engine settings share their
engines. Groups with different settings can run side by side and write to the same file. Several pairs with small caches
reduce the error, because two identical engines differ by up to a percent. A pair with a large cache runs large batches.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.variants import SAE_VARIANT

CONTROL = "stock again"
"""Variant name of a second stock engine."""
PREFILL = "prefill"
"""Batch name of a single prompt of 8,192 tokens."""


class BenchmarkGroup(NamedTuple):
    """Pairs of engines of a shape, and the cells measured with them, each as ``VARIANT@BATCH,BATCH``."""

    shape: str
    kv_gib: float
    cells: tuple[str, ...]
    pairs: int = 1
    repeats: int = 5
    generated: int = 256
    tensor_parallel: int = 1


_QUEUES = (
    "16 probes by name at 4 layers, all tokens@1000", "capture one layer, all tokens@1000", "idle@1000",
    "own program each@1000", "capture all layers, last prompt token@1000", "capture all layers, all tokens@32",
)  # fmt: skip
GROUPS: dict[str, BenchmarkGroup] = {
    # 16 GiB of weights per engine. Three pairs with small caches need some 112 GiB; large batches and queues, with a
    # second stock engine, need 84 GiB.
    "llama-8b, small batches": BenchmarkGroup(
        "llama-8b", 1.2, ("idle@1,8,32", "one site@1,8,32", "all sites@1", "idle@prefill", "one site@prefill"), pairs=3
    ),
    "llama-8b, large batches": BenchmarkGroup(
        "llama-8b", 9.2,
        ("idle@128,256", "one site@128,256", f"{CONTROL}@128,256", "all sites@128", "own program each@256"),
    ),
    "llama-8b, queues": BenchmarkGroup("llama-8b", 9.2, _QUEUES),
    # For one GPU of 80 GiB: three engines of 15 GiB of weights, with caches for 256 requests of 144 tokens.
    "llama-8b, one pair": BenchmarkGroup(
        "llama-8b", 4.8,
        ("idle@1,8,32,128,256,prefill", "one site@1,8,32,128,256,prefill", f"{CONTROL}@128,256", "all sites@1,128",
         "own program each@256"), generated=128,
    ),
    # Features whose figures are the newest come first, because a run may be cut off.
    "llama-8b, readouts": BenchmarkGroup(
        "llama-8b", 9.2,
        ("live strength@1,32,256", "lens at one layer@1,32,256", f"{SAE_VARIANT}@1,32,256",
         "readout of one probe@1,32,256", "gate of one probe@1,32,256", "idle@1,32,256"), repeats=3, generated=128,
    ),
    # These runs are short, and runs of one engine differ by up to a third: the first requests may start before the
    # others have arrived.
    "llama-8b, first tokens": BenchmarkGroup(
        "llama-8b", 9.2, ("idle@1,8,32,128,256", f"{CONTROL}@1,8,32,128,256", "one site@1,8,32,128,256"),
        repeats=12, generated=1,
    ),
    "llama-8b, two GPUs": BenchmarkGroup(
        "llama-8b", 5, ("idle@1,32,128", "one site@1,32", "all sites@1,128"), tensor_parallel=2, repeats=7
    ),
    # Steps are limited by the host: many repeats, several pairs, and no other load.
    "qwen3-0.6b": BenchmarkGroup(
        "qwen3-0.6b", 4, ("idle@1,8,32,128", "one site@1,32,128", "all sites@1,128"), pairs=2, repeats=8
    ),
    "granite-4-tiny": BenchmarkGroup(
        "granite-4-tiny", 2, ("idle@1,8,32,128", "one site@1,32", "all sites@1"), repeats=8, generated=128
    ),
    "qwen3-30b-a3b": BenchmarkGroup(
        "qwen3-30b-a3b", 2.7, ("idle@1,8,32,128", "one site@1,32,128", "all sites@1,128"), generated=96
    ),
    "tiny": BenchmarkGroup(
        "tiny", 0.25, ("idle@1", "one site@1", "live strength@1", "lens at one layer@1", f"{SAE_VARIANT}@1",
                       "readout of one probe@1", "gate of one probe@1"), repeats=1, generated=8,
    ),
    "gemma3-27b": BenchmarkGroup(
        "gemma3-27b", 4.6, ("idle@1,8,32,128,prefill", "one site@1,32,128,prefill", "all sites@1,32"), generated=96
    ),
}  # fmt: skip
