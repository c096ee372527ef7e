# SPDX-License-Identifier: Apache-2.0
"""Metrics of a consumer's queue."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.registry.modules import CAPABILITIES
from vllm_steer.capture.manager import CaptureManager
from vllm_steer.capture.results import CaptureResult
from vllm_steer.metrics.collectors import start
from vllm_steer.metrics.definitions import PREFIX

MODEL = "a model with consumers"


def value(short: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(PREFIX + short, {"model_name": MODEL, "consumer": "memory", **labels})


def test_queue_counts_waiting_and_running_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a queue that never shrinks or omits the running capture, and a failure counted as a success."""
    start({})
    go = threading.Event()
    statuses = iter(["ok", "error", "ok"])

    def deliver(*_: Any) -> CaptureResult:
        go.wait(60)
        return CaptureResult(next(statuses), None, None)  # type: ignore[arg-type]

    desk = CaptureManager(CAPABILITIES, MODEL, {})
    monkeypatch.setattr(desk, "_deliver", deliver)
    assert value("consumer_queue") == 0
    results = [desk.submit(desk.new_assembler(), (("memory", None),)) for _ in range(3)]  # type: ignore[arg-type]
    assert value("consumer_queue") == 3
    go.set()
    assert [each["memory"].status for each in results] == ["ok", "error", "ok"]
    desk.close()
    assert value("consumer_queue") == 0
    counted = {status: value("consumer_results_total", status=status) for status in ("ok", "partial", "error")}
    assert counted == {"ok": 2, "partial": 0, "error": 1}
    assert value("consumer_wait_seconds_count") == value("consumer_seconds_count") == 3
