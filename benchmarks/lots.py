# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks/cost.py`` is to measure of each shape so that the page has every figure, and what memory it takes.

One H200 has 140 GiB. All engines of the lots that are named start together and stay; a pair takes twice its weights,
its caches and some 3 GiB for graphs. Lots of a shape whose engines are the same are measured with the same ones.
Those of others may stand beside each other and go into one file: several pairs with small caches, since two engines
that do the same are up to a percent apart, and one with a large cache.
"""

from __future__ import annotations

from typing import NamedTuple

CONTROL = "stock again"
"""In the place of a variant: a second stock engine."""
PREFILL = "prefill"
"""In the place of a batch: one prompt of 8,192 tokens."""


class Lot(NamedTuple):
    """Pairs of engines of a shape and the cells that are measured with them, each as ``VARIANT@BATCH,BATCH``."""

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
LOTS: dict[str, Lot] = {
    # 16 GiB of weights each. In three pairs with small caches, some 112 GiB; large batches and queues, with a second
    # stock engine, 84.
    "llama-8b, small batches": Lot(
        "llama-8b", 1.2, ("idle@1,8,32", "one site@1,8,32", "all sites@1", "idle@prefill", "one site@prefill"), pairs=3
    ),
    "llama-8b, large batches": Lot(
        "llama-8b", 9.2,
        ("idle@128,256", "one site@128,256", f"{CONTROL}@128,256", "all sites@128", "own program each@256"),
    ),
    "llama-8b, queues": Lot("llama-8b", 9.2, _QUEUES),
    # A run is short, and one of the same engine takes up to a third more than another: a few requests that are there
    # already begin without the others.
    "llama-8b, first tokens": Lot(
        "llama-8b", 9.2, ("idle@1,8,32,128,256", f"{CONTROL}@1,8,32,128,256", "one site@1,8,32,128,256"),
        repeats=12, generated=1,
    ),
    "llama-8b, two GPUs": Lot(
        "llama-8b", 5, ("idle@1,32,128", "one site@1,32", "all sites@1,128"), tensor_parallel=2, repeats=7
    ),
    # The host is most of a step here: many repeats, several pairs, nothing beside.
    "qwen3-0.6b": Lot(
        "qwen3-0.6b", 4, ("idle@1,8,32,128", "one site@1,32,128", "all sites@1,128"), pairs=2, repeats=8
    ),
    "granite-4-tiny": Lot(
        "granite-4-tiny", 2, ("idle@1,8,32,128", "one site@1,32", "all sites@1"), repeats=8, generated=128
    ),
    "qwen3-30b-a3b": Lot(
        "qwen3-30b-a3b", 2.7, ("idle@1,8,32,128", "one site@1,32,128", "all sites@1,128"), generated=96
    ),
    "gemma3-27b": Lot(
        "gemma3-27b", 4.6, ("idle@1,8,32,128,prefill", "one site@1,32,128,prefill", "all sites@1,32"), generated=96
    ),
}  # fmt: skip
