# SPDX-License-Identifier: Apache-2.0
"""Section of docs/reference/features.md about tests that ran on a GPU, which CI does not have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_tests import summarize

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MakeTable = Callable[[tuple[str, ...], list[tuple[str, ...]]], str]

TEXT = """
## On a GPU

CI has none. What came of the tests that need one, and of the fuzzer, when they last ran (`python -m
benchmarks.gpu_tests`, {gpu}, vLLM {vllm}, torch {torch}, Triton {triton}; `benchmarks/results/gpu-tests.json`).
`python -m benchmarks.build` says what of the code has changed since.

"""


def gpu_tests(table: MakeTable) -> str:
    runs: dict[str, dict[str, Any]] = json.loads((RESULTS / "gpu-tests.json").read_text())["runs"]
    rows = [
        (found["covers"].replace("``", "`"), f"`{found['command']}`", summarize(found), found.get("note", ""))
        for found in runs.values()
    ]
    environment = next(iter(runs.values()))["environment"]
    return TEXT.format(**environment) + table(("what", "command", "outcome", ""), rows)
