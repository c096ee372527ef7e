# SPDX-License-Identifier: Apache-2.0
"""Reading the records of one sample while it runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from vllm_steer.capture import row_receiver, step_rows
from vllm_steer.capture.record_reader import RecordReader
from vllm_steer.capture.row_assembler import RowAssembler
from vllm_steer.capture.row_payload import RECORDS
from vllm_steer.capture.row_receiver import RowReceiver
from vllm_steer.capture.step_rows import RowIndex, StepRows

WIDTH = 3
IDS = ("other", "own")
INDEX = RowIndex(IDS, ((WIDTH,), (WIDTH,)), RECORDS)


def step(start: int, count: int = 1, version: int = 0) -> StepRows:
    """Return a step of two requests; a record holds the number of its request, its position and ``version``."""
    tokens = [(number, start + i, version) for number in range(2) for i in range(count)]
    rows = np.array(tokens, np.float32).view(np.uint8)
    return StepRows(INDEX, np.full(2, start), np.full(2, count), rows)


@pytest.fixture(params=[False, True], ids=["alone", "with captures"])
def reader(request: pytest.FixtureRequest) -> tuple[RecordReader, Callable[[StepRows], None], RowReceiver]:
    """Return a reader of the second request, a function that adds a step, and the receiver."""
    receiver = RowReceiver()
    assemblers = {name: RowAssembler(1, 8, torch.float32) for name in IDS}
    for name, assembler in assemblers.items():
        receiver.add_request(name, assembler)

    def add(rows: StepRows) -> None:
        assert assemblers  # kept alive
        receiver._steps.append(rows)
        receiver._size += rows.rows.nbytes

    return RecordReader(receiver, assemblers["own"], "own", shared=request.param), add, receiver


def test_every_record_is_read_once(reader: tuple[RecordReader, Callable[[StepRows], None], RowReceiver]) -> None:
    """Catches records of another request, of another token, or read twice."""
    records, add, _ = reader
    add(step(0, 4))
    assert records.take(4) == ([0, 1, 2, 3], [[1.0, p, 0.0] for p in range(4)])
    add(step(4))
    assert records.take(5) == ([4], [[1.0, 4.0, 0.0]])
    assert records.take(5) == ([], [])
    add(step(5))
    add(step(6))
    assert records.take(7)[0] == [5, 6]


def test_unconfirmed_records_wait(reader: tuple[RecordReader, Callable[[StepRows], None], RowReceiver]) -> None:
    """Catches (1) records of rejected drafts and (2) records lost because they arrive ahead of their output."""
    records, add, _ = reader
    add(step(0, 3))
    assert records.take(1)[0] == [0]
    add(step(2, 3, version=1))
    assert records.take(4) == ([1, 2, 3], [[1.0, 1.0, 0.0], [1.0, 2.0, 1.0], [1.0, 3.0, 1.0]])
    add(step(4, version=2))
    assert records.take(5) == ([4], [[1.0, 4.0, 2.0]])


def test_recomputed_positions_are_skipped(reader: tuple[RecordReader, Callable[[StepRows], None], RowReceiver]) -> None:
    """Catches positions that a preempted request streams a second time."""
    records, add, _ = reader
    add(step(0, 4))
    assert records.take(4)[0] == [0, 1, 2, 3]
    add(step(0, 5, version=1))
    assert records.take(5) == ([4], [[1.0, 4.0, 1.0]])


def test_records_survive_a_full_buffer(
    reader: tuple[RecordReader, Callable[[StepRows], None], RowReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches records lost or out of order when the buffer is emptied, and when the request has finished."""
    records, add, receiver = reader
    add(step(0, 2))
    assert records.take(1)[0] == [0]
    monkeypatch.setattr(row_receiver, "MAX_STEPS", 0)
    add(step(2))
    for name in IDS:
        receiver.flush(name)
    receiver._clear()
    add(step(3))
    receiver.finish_request("own")
    assert records.take(4) == ([1, 2, 3], [[1.0, p, 0.0] for p in (1, 2, 3)])
    assert records.take(5) == ([], [])


def test_long_steps_are_not_listed_whole(
    reader: tuple[RecordReader, Callable[[StepRows], None], RowReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a prefill of many requests that is converted to Python numbers as a whole, and wrong parts of it."""
    monkeypatch.setattr(step_rows, "_MAX_LISTED_RECORDS", 3)
    records, add, _ = reader
    long = step(0, 4)
    add(long)
    assert records.take(4)[1] == [[1.0, p, 0.0] for p in range(4)]
    assert "_records" not in vars(long)
