# SPDX-License-Identifier: Apache-2.0
"""Tests of the summary of a GPU profile."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.trace import ONCE_A_STEP, summary


def event(name: str, start: float, duration: float, stream: int) -> dict[str, Any]:
    return {"name": name, "ts": start, "dur": duration, "args": {"stream": stream}}


def test_a_step_ends_with_sampling() -> None:
    """Catches waiting time counted as busy, overlapping kernels counted twice, and warm-up steps in the median."""
    work = [event("warm up", -4000, 100, 7), event(f"void {ONCE_A_STEP}", -3000, 100, 7)]
    for i in range(6):
        begin = 1000.0 * i
        work += [
            event("gemm", begin, 600, 7),
            event("short", begin + 100, 50, 7),  # over before the one in front
            event("tap", begin + 550, 100, 7),  # launched while the one in front still runs
            event("copy", begin + 500, 350, 8),
            event(f"void {ONCE_A_STEP}", begin + 700, 100, 7),
        ]
    found = summary(sorted(work, key=lambda e: (e["args"]["stream"], e["ts"])), 2, 5)
    assert found["steps"] == 3
    assert (found["step"], found["busy"], found["others"]) == pytest.approx((1.0, 0.75, 0.35))
    assert found["idle"] == pytest.approx(0.25)
    assert found["kernels"] == pytest.approx(
        {"gemm": 0.6, "copy": 0.35, "tap": 0.1, "short": 0.05, f"void {ONCE_A_STEP}": 0.1}
    )
    assert found["waits"] == pytest.approx({"gemm": 0.2, "short": 0, "tap": 0, f"void {ONCE_A_STEP}": 0.05})
    assert found["periods"] == [3.7, 1.0, 1.0, 1.0, 1.0, 1.0]
