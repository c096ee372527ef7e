# SPDX-License-Identifier: Apache-2.0
"""GPU: the newest models with vLLM's own kernels, mixes and caches, in bfloat16 (``frontier.py``).

Each model runs in a process of its own, because an illegal memory access spoils the process, and for at most
$FRONTIER_SECONDS. $FRONTIER_AT_ONCE models run at a time, in the order of their priority; ``-k`` selects some. Models
whose kernels need a package that is missing are skipped. When a model has ended, its outcome is written to
``benchmarks/results/frontier-gpu.json`` or $FRONTIER_OUT, in place of its earlier outcome.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import environment
from tests.gpu.frontier import NAMES
from tests.gpu.frontier_outcomes import run_model, store

pytestmark = pytest.mark.gpu

OUT = Path(os.environ.get("FRONTIER_OUT", "benchmarks/results/frontier-gpu.json"))
SECONDS = float(os.environ.get("FRONTIER_SECONDS", "240"))
AT_ONCE = int(os.environ.get("FRONTIER_AT_ONCE", "4"))

Outcomes = dict[str, "Future[dict[str, Any]]"]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """Start the selected models, several at a time."""
    selected = {item.callspec.params["name"] for item in request.session.items if item.module is request.module}  # type: ignore[attr-defined]
    folder, about = tmp_path_factory.mktemp("frontier"), environment()

    def run(name: str) -> dict[str, Any]:
        outcome = run_model(name, folder, SECONDS)
        store(outcome, OUT, about)
        return outcome

    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {name: pool.submit(run, name) for name in NAMES if name in selected}
        yield running
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", NAMES)
def test_values_and_causes(name: str, outcomes: Outcomes) -> None:
    """Catches taps that are right beside plain attention and formulas only; ``catches`` names the special case."""
    outcome = outcomes[name].result()
    if outcome["outcome"] == "skipped":
        pytest.skip(outcome["reason"])
    assert outcome["outcome"] == "passed", "\n".join([*outcome.get("problems", ()), *outcome.get("error", ())])
