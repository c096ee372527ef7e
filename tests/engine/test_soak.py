# SPDX-License-Identifier: Apache-2.0
"""A short soak; ``python -m tests.engine.soak`` runs as long a one as one likes."""

from __future__ import annotations

from pathlib import Path

from tests.engine.soak import soak


def test_a_hundred_mixed_requests_with_preemption_lose_and_repeat_no_row(tiny_llama: Path) -> None:
    """Catches rows lost, repeated or exchanged by what the engine does under pressure, and books that leak."""
    outcome = soak(tiny_llama, 100, seed=1)
    assert not outcome.wrong, outcome.wrong[:10]
    assert outcome.compared >= 90
    assert outcome.preempted > 0
    assert outcome.cached_tokens > 0
    assert outcome.rows > 1000
