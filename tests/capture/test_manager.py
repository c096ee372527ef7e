# SPDX-License-Identifier: Apache-2.0
"""When consumers start on a finished sample."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.registry.modules import CAPABILITIES
from tests.tiny import code_of
from vllm_steer.capture.files.packed_file import PackedFile
from vllm_steer.capture.files.reader import open_captures
from vllm_steer.capture.manager import CaptureManager
from vllm_steer.capture.row_assembler import RowChunk
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
    desk, noted = CaptureManager(CAPABILITIES, "a model with one consumer", {}), Noted()
    desk._consumers["memory"] = noted  # type: ignore[assignment]
    about = {"request_id": "a", "sample": 0, "prompt_token_ids": (1, 2), "output_token_ids": (3,)}
    with pytest.raises(RuntimeError), desk.pause_consumers():
        results = desk.submit(desk.new_assembler(), (("memory", SPEC),), **about)
        assert not noted.started.wait(0.2)
        raise RuntimeError
    assert results["memory"].status == "partial"
    assert noted.started.is_set()
    desk.close()


def test_results_can_be_copied_and_sent() -> None:
    """Catches outputs that vLLM's users send to other processes, and that cannot be where something was captured."""
    desk = CaptureManager(CAPABILITIES, "a model whose results travel", {})
    assembler = desk.new_assembler()
    width = CAPABILITIES.hidden_size
    rows = np.arange(2 * width, dtype=CAPABILITIES.dtype).reshape(2, width)
    assembler.add([RowChunk("a", 0, 2, (code_of("post_block", 0),), rows.view(np.uint8))])
    spec = CaptureSpec(hooks={"post_block": [0]}, positions="all")
    about = {"request_id": "a", "sample": 0, "prompt_token_ids": (1, 2), "output_token_ids": (3,)}
    results = desk.submit(assembler, (("memory", spec),), **about)
    for made in (pickle.loads(pickle.dumps(results)), copy.deepcopy(results)):  # noqa: S301
        assert made["memory"].status == "ok"
        assert made["memory"].data.spec == spec
        assert made["memory"].positions("post_block", 0).tolist() == [0, 1]
        assert torch.equal(made["memory"].tensor("post_block", 0), torch.from_numpy(rows))
    desk.close()


class Engine:
    """Something that only the garbage collector ends."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("busy_with", ["append", "seal"])
def test_an_engine_may_end_in_a_consumers_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy_with: str
) -> None:
    """Catches a file of many requests that never appears: the garbage collector comes while a consumer's own thread,
    or its timer's, is at it, and finds there that the engine is to be closed."""
    options = {"root": str(tmp_path), "layout": "packed", "max_seconds": 1 if busy_with == "seal" else 600}
    desk = CaptureManager(CAPABILITIES, "a model with files", {"filesystem": options})
    engine = Engine()
    ended = weakref.finalize(engine, desk.close_from_finalizer)
    method = getattr(PackedFile, busy_with)
    monkeypatch.setattr(PackedFile, busy_with, lambda *args: (gc.collect(), method(*args))[1])
    about = {"request_id": "a", "sample": 0, "prompt_token_ids": (1, 2), "output_token_ids": (3,)}
    gc.disable()
    try:
        del engine
        assert desk.submit(desk.new_assembler(), (("filesystem", SPEC),), **about)["filesystem"].status == "partial"
        deadline = time.monotonic() + 20
        while not list(tmp_path.glob("*.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        gc.enable()
    assert not ended.alive
    assert [request.request_id for request in open_captures(tmp_path)] == ["a"]
    assert "is closed" in str(desk.submit(desk.new_assembler(), (("filesystem", SPEC),), **about)["filesystem"].error)
