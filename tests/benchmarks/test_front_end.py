# SPDX-License-Identifier: Apache-2.0
"""Tests that benchmarks.front_end works with the current front end."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import front_end
from benchmarks.front_end import PROBES, make_context, measure, measure_results, measure_stream, read_probes


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in (("REQUESTS", 4), ("WARM_UP", 1), ("BATCH", 4), ("CHUNKS", 20), ("HIDDEN", 64)):
        monkeypatch.setattr(front_end, name, count)


def test_measures_requests_and_streams() -> None:
    """Catches a stand-in for vLLM's requests and outputs that lacks an attribute that steering reads."""
    context = make_context()
    named = read_probes([f"bench/{name}" for name in PROBES])
    assert measure(lambda i: named, context) > 0
    assert measure(lambda i: named, context, http=True) > 0
    assert measure_stream(named, context) > 0


@pytest.mark.parametrize("name", ["memory", "filesystem"])
def test_measures_results(name: str, tmp_path: Path) -> None:
    """Catches the same at the end of a captured request."""
    context = make_context({"filesystem": {"root": str(tmp_path)}})
    try:
        assert measure_results(name, context) > 0
    finally:
        context.capture_manager.close()
