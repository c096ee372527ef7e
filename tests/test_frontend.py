# SPDX-License-Identifier: Apache-2.0
"""What is kept for an engine client, and how long."""

from __future__ import annotations

import gc

import pytest

from tests.serve.fakes import FakeEngine
from vllm_steer.capture.desk import CaptureDesk
from vllm_steer.frontend import ensure_served


async def test_consumers_are_closed_with_their_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches files of many requests that are lost at the end of a script, since nobody completes them."""
    closed: list[CaptureDesk] = []
    monkeypatch.setattr(CaptureDesk, "close", lambda desk: closed.append(desk))
    engine = FakeEngine()
    served = await ensure_served(engine)
    gc.collect()
    assert served is not None and closed == []
    del engine
    gc.collect()
    assert closed == [served.desk]
