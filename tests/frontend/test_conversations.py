# SPDX-License-Identifier: Apache-2.0
"""Parts of random conversations, beside an oracle that knows them from how it drew the tokens."""

from __future__ import annotations

import numpy as np
import pytest

from tests.frontend import conversations
from tests.frontend.conversations import find_wrong_part
from vllm_steer.frontend.roles import RoleTokens


def test_parts_of_random_conversations() -> None:
    """Catches an earlier turn, a text or a tool call that decides about a part, and a message of another role."""
    rng = np.random.default_rng(0)
    assert [found for found in (find_wrong_part(rng) for _ in range(500)) if found] == []


def test_oracle_detects_a_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: parts that the whole prompt decides must be noticed."""
    monkeypatch.setattr(RoleTokens, "open_message", lambda self, prompt: 0)
    rng = np.random.default_rng(0)
    # The end of a message ends all spans, so only what ends none shows the difference.
    monkeypatch.setattr(
        conversations, "MARKERS", {name: each._replace(breaks=()) for name, each in conversations.MARKERS.items()}
    )
    assert any(find_wrong_part(rng) for _ in range(100))
