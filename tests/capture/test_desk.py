# SPDX-License-Identifier: Apache-2.0
"""When consumers start on a finished sample."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.registry.modules import CAPABILITIES
from vllm_steer.capture.desk import CaptureDesk
from vllm_steer.spec import CaptureSpec

SPEC = CaptureSpec(hooks={"post_block": [0]})


class Noted:
    """A consumer that says when it starts."""

    def __init__(self) -> None:
        self.started = threading.Event()

    def accept(self, captured: Any) -> None:
        self.started.set()


def test_no_consumer_starts_while_outputs_are_processed() -> None:
    """Catches a consumer's thread that contends with the one that processes outputs, and one that waits for ever after
    an error there."""
    desk, noted = CaptureDesk(CAPABILITIES, "a model with one consumer", {}), Noted()
    desk._consumers["memory"] = noted  # type: ignore[assignment]
    about = {"request_id": "a", "sample": 0, "prompt_token_ids": (1, 2), "output_token_ids": (3,)}
    with pytest.raises(RuntimeError), desk.held_back():
        results = desk.finish(desk.begin(), (("memory", SPEC),), **about)
        assert not noted.started.wait(0.2)
        raise RuntimeError
    assert results["memory"].status == "partial"
    assert noted.started.is_set()
    desk.close()
