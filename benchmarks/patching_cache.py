# SPDX-License-Identifier: Apache-2.0
"""Prefix-cache hit rates of patching studies.

    python -m benchmarks.patching_cache --out benchmarks/results/patching-cache.json

Studies of random prompts run on a small random Llama with blocks of 32 tokens, one after another, each with prompts of
its own. The rate counts the prompt tokens of all requests of a study: cells, controls and repeated unpatched runs. The
bound is the rate if each cell found every full block before its first patched position. The figures depend neither on
speed nor on the model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cache_hits import BLOCK, VOCAB, small_engine

CASES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "64 tokens, all positions": (64, 1, {}, {}),
    "256 tokens, every 4th position": (256, 4, {}, {}),
    "1,024 tokens, every 16th position": (1024, 16, {}, {}),
    "256 tokens, every 4th position, answer of 3 tokens": (256, 4, {"answer": [3, 5, 7], "foil": [4, 6, 8]}, {}),
    "256 tokens, every 4th position, noising": (256, 4, {}, {"direction": "noising"}),
    "256 tokens, every 4th position, windows of 8": (256, 4, {}, {"position_window": 8}),
    "256 tokens, last 32 positions": (256, 1, {}, {"positions": list(range(224, 256))}),
}
"""Length of the prompts, step of the positions, and further arguments of the study and of the sweep."""


def measure(llm: Any, number: int, case: str) -> dict[str, Any]:
    """Return tokens, cached tokens, the hit rate and its bound for one study."""
    from vllm_steer.patching import PatchingStudy

    length, step, study, sweep = CASES[case]
    random = np.random.default_rng(number)
    clean, corrupt = (random.integers(1, VOCAB, length).tolist() for _ in range(2))
    arguments = {"clean": clean, "corrupt": corrupt, "answer": [3], "foil": [4], **study}
    positions = list(range(0, length, step))
    result = PatchingStudy(llm, **arguments).sweep(
        **{"layers": [1, 2], "positions": positions, "progress": False, **sweep}
    )
    starts = [start // BLOCK * BLOCK for start, _ in result.info.pairs[0].columns]
    return {
        "cells": int(result.cells[..., 0].size),
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "hit_rate": round(result.cache_hit_rate, 4),
        "bound": round(float(np.mean(starts)) / length, 4),
        "failed": len(result.errors),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    with small_engine() as llm:
        rows = []
        for number, case in enumerate(CASES):
            rows.append({"case": case, **measure(llm, number, case)})
            print(json.dumps(rows[-1]), flush=True)
    out.write_text(json.dumps({"setup": {"block_size": BLOCK}, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
