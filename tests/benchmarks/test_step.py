# SPDX-License-Identifier: Apache-2.0
"""The host's part of a step is measured with the scheduler and the runner that there are."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from benchmarks import step


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, count in (("WAVES", 2), ("STEPS", 2), ("RUNS", 1)):
        monkeypatch.setattr(step, name, count)
    yield
    gc.unfreeze()


@pytest.mark.parametrize("kind", ["one layer", "16 probes at 4 layers", "own vectors at one site"])
def test_waves_are_served(kind: str) -> None:
    """Catches a stand-in for vLLM's parts that lacks what ours now ask it for."""
    assert min(step.wave(kind, 4).values()) > 0


def test_steps_are_made() -> None:
    """Catches the same in idle and settled steps."""
    assert step.scheduling(4) != 0
    assert step.scheduling(4, reading=True) != 0
    assert step.worker(0) != 0
    assert step.worker(4) != 0
