# SPDX-License-Identifier: Apache-2.0
"""Tests that benchmarks.step works with the current scheduler and worker."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from benchmarks import step


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, count in (("WAVES", 2), ("STEPS", 2), ("RUNS", 1)):
        monkeypatch.setattr(step, name, count)
    yield
    gc.unfreeze()


@pytest.mark.parametrize("kind", ["one layer", "16 probes at 4 layers", "own vectors at one site"])
def test_measures_waves(kind: str) -> None:
    """Catches a stand-in for vLLM's runner or scheduler that lacks an attribute that steering reads."""
    assert min(step.measure_wave(kind, 4).values()) > 0


def test_measures_idle_and_settled_steps() -> None:
    """Catches the same outside of waves."""
    assert step.measure_scheduler(4) != 0
    assert step.measure_scheduler(4, capture=True) != 0
    assert step.measure_worker(0) != 0
    assert step.measure_worker(4) != 0
