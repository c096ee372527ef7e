# SPDX-License-Identifier: Apache-2.0
"""Delivery of finished samples to consumers, and closing of consumers."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY

from tests.registry.modules import CAPABILITIES
from tests.tiny import code_of
from vllm_steer.capture.consumers.logging import LoggingConsumer
from vllm_steer.capture.files.reader import open_captures
from vllm_steer.capture.files.rotation import StreamWriter
from vllm_steer.capture.manager import CaptureManager
from vllm_steer.capture.row_assembler import RowChunk
from vllm_steer.log import LimitedLog
from vllm_steer.metrics.collectors import start
from vllm_steer.request import CaptureSpec
from vllm_steer.server.http.result_waiter import wait_for

SPEC = CaptureSpec(hooks={"post_block": [0]})
TO_FILE = (("filesystem", SPEC),)


class RecordingConsumer:
    """A consumer that signals when it starts."""

    def __init__(self) -> None:
        self.started = threading.Event()

    def accept(self, captured: Any) -> None:
        self.started.set()


def test_pause_consumers() -> None:
    """Catches a consumer that runs while outputs are processed, and one that never runs after an exception there."""
    manager, consumer = CaptureManager(CAPABILITIES, "a model with one consumer", {}), RecordingConsumer()
    manager._consumers["memory"] = consumer  # type: ignore[assignment]
    about = {"request_id": "a", "sample": 0, "prompt_token_ids": (1, 2), "output_token_ids": (3,)}
    with pytest.raises(RuntimeError), manager.pause_consumers():
        results = manager.submit(manager.new_assembler(), (("memory", SPEC),), **about)
        assert not consumer.started.wait(0.2)
        raise RuntimeError
    assert results["memory"].status == "partial"
    assert consumer.started.is_set()
    manager.close()


class Panic(BaseException):
    """Stands for ``pyo3_runtime.PanicException``, which is not an ``Exception``."""


@pytest.mark.parametrize("error", [SystemExit(3), Panic("a panic"), asyncio.CancelledError()], ids=repr)
async def test_any_exception_of_a_consumer_fails_its_capture_only(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an API server that a consumer's exit ends, and a queue that counts a failed capture forever."""

    def accept(consumer: Any, captured: Any) -> None:
        raise error

    start({})
    model = f"a model whose consumer raises {type(error).__name__}"
    manager = CaptureManager(CAPABILITIES, model, {"logging": {}})
    monkeypatch.setattr(LoggingConsumer, "accept", accept)
    about = {"request_id": "a", "sample": 0, "prompt_token_ids": (1, 2), "output_token_ids": (3,)}
    results = manager.submit(manager.new_assembler(), (("logging", SPEC), ("memory", SPEC)), **about)
    result = await wait_for(results.futures["logging"])
    assert (result.status, result.error) == ("error", f"{type(error).__name__}: {error}")
    assert results["memory"].status == "partial"
    labels = {"model_name": model, "consumer": "logging"}
    assert REGISTRY.get_sample_value("vllm_steer:consumer_queue", labels) == 0
    manager.close()


def test_results_can_be_copied_and_pickled() -> None:
    """Catches vLLM outputs that cannot be sent to another process once they carry results."""
    manager = CaptureManager(CAPABILITIES, "a model whose results travel", {})
    assembler = manager.new_assembler()
    width = CAPABILITIES.hidden_size
    rows = np.arange(2 * width, dtype=CAPABILITIES.dtype).reshape(2, width)
    assembler.add([RowChunk("a", 0, 2, (code_of("post_block", 0),), rows.view(np.uint8))])
    spec = CaptureSpec(hooks={"post_block": [0]}, positions="all")
    about = {"request_id": "a", "sample": 0, "prompt_token_ids": (1, 2), "output_token_ids": (3,)}
    results = manager.submit(assembler, (("memory", spec),), **about)
    for copied in (pickle.loads(pickle.dumps(results)), copy.deepcopy(results)):  # noqa: S301
        assert copied["memory"].status == "ok"
        assert copied["memory"].data.spec == spec
        assert copied["memory"].positions("post_block", 0).tolist() == [0, 1]
        assert torch.equal(copied["memory"].tensor("post_block", 0), torch.from_numpy(rows))
    manager.close()


class Engine:
    """An object in a reference cycle, which only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("method_name", ["append", "seal"])
def test_engine_is_collected_in_a_consumers_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method_name: str
) -> None:
    """Catches a deadlock, and so a file that is never completed.

    The garbage collector finalizes the engine in the consumer's thread, or in its timer's, while that writes the file.
    """
    options = {"root": str(tmp_path), "layout": "packed", "max_seconds": 1 if method_name == "seal" else 600}
    manager = CaptureManager(CAPABILITIES, "a model with files", {"filesystem": options})
    engine = Engine()
    closed = threading.Event()
    weakref.finalize(engine, lambda: (manager.close_from_finalizer(), closed.set()))
    method = getattr(StreamWriter, method_name)
    monkeypatch.setattr(StreamWriter, method_name, lambda *args: (gc.collect(), method(*args))[1])
    about = {"request_id": "a", "sample": 0, "prompt_token_ids": (1, 2), "output_token_ids": (3,)}
    gc.disable()
    try:
        del engine
        assert manager.submit(manager.new_assembler(), TO_FILE, **about)["filesystem"].status == "partial"
        assert closed.wait(20)
    finally:
        gc.enable()
    assert [request.request_id for request in open_captures(tmp_path)] == ["a"]
    assert "is closed" in str(manager.submit(manager.new_assembler(), TO_FILE, **about)["filesystem"].error)


class HungConsumer:
    """A consumer that never returns from its first capture."""

    def __init__(self) -> None:
        self.started, self.closed = threading.Event(), False
        self.thread: threading.Thread | None = None

    def accept(self, captured: Any) -> None:
        self.thread = threading.current_thread()
        self.started.set()
        threading.Event().wait()

    def close(self) -> None:
        self.closed = True


def test_hung_consumer_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a shutdown that waits forever for a consumer, and results that are never completed.

    The other consumer, which works, must still be closed.
    """
    monkeypatch.setattr("vllm_steer.capture.manager.HUNG_SECONDS", 0.05)
    manager, hung = CaptureManager(CAPABILITIES, "a model with a hung consumer", {"logging": {}}), HungConsumer()
    works = HungConsumer()
    works.accept = lambda captured: None  # type: ignore[method-assign]
    manager._consumers["memory"], manager._consumers["logging"] = hung, works  # type: ignore[assignment]
    about = {"request_id": "a", "sample": 0, "prompt_token_ids": (1, 2), "output_token_ids": (3,)}
    results = [
        manager.submit(manager.new_assembler(), (("memory", SPEC), ("logging", SPEC)), **about) for _ in range(2)
    ]
    assert hung.started.wait(20)
    manager.close()
    assert [each["memory"].status for each in results] == ["error"] * 2
    assert "has finished nothing" in str(results[1]["memory"].error)
    assert [each["logging"].status for each in results] == ["partial"] * 2
    assert works.closed and not hung.closed
    assert "is closed" in str(manager.submit(manager.new_assembler(), (("memory", SPEC),), **about)["memory"].error)
    assert hung.thread is not None and hung.thread.is_alive() and hung.thread.daemon


def test_errors_of_consumers_are_logged_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a full disk that no log mentions, and one that writes a line for every request."""
    lines: list[str] = []
    monkeypatch.setattr(
        "vllm_steer.capture.manager.logger.error", lambda message, *args, **_: lines.append(message % args)
    )
    manager = CaptureManager(CAPABILITIES, "a model with a failing consumer", {})
    failing = HungConsumer()
    failing.accept = lambda captured: 1 / 0  # type: ignore[method-assign]
    manager._consumers["memory"] = failing  # type: ignore[assignment]
    about = {"request_id": "a", "sample": 0, "prompt_token_ids": (1, 2), "output_token_ids": (3,)}
    for _ in range(11):
        assert manager.submit(manager.new_assembler(), (("memory", SPEC),), **about)["memory"].status == "error"
    manager.close()
    assert lines == ["Capture consumer memory failed: division by zero"]


def test_limited_log() -> None:
    """Catches errors that are never logged again, and keys of clients that fill the memory."""
    now, lines = 0.0, []
    logger = SimpleNamespace(error=lambda message, *args, **_: lines.append(message % args))
    log = LimitedLog(logger, interval=60.0, clock=lambda: now)
    for now in (0.0, 1.0, 59.0, 60.0, 61.0, 130.0):
        log.error("a", "failed at %d", int(now))
    assert lines == [
        "failed at 0",
        "failed at 60 (2 similar errors were not logged)",
        "failed at 130 (1 similar errors were not logged)",
    ]
    for number in range(1000):
        log.error(str(number), "failed")
    assert len(log._logged) <= LimitedLog.MAX_KEYS + 1
