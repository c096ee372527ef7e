# SPDX-License-Identifier: Apache-2.0
"""Reading the records of one sample while it runs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
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


def test_a_record_as_json_is_the_only_new_one(
    reader: tuple[RecordReader, Callable[[StepRows], None], RowReceiver],
) -> None:
    """Catches JSON of one record while others wait, of another request, of a draft, or read twice."""
    records, add, _ = reader
    alone = not records._shared
    add(step(0, 3))
    assert records.take_json(3) is None  # three records
    assert records.take(3)[0] == [0, 1, 2]
    add(step(3))
    assert records.take_json(3) is None  # the token at 3 is not confirmed
    assert records.take_json(4) == ([b"1.0", b"3.0", b"0.0"] if alone else None)
    assert records.take_json(4) is None
    assert records.take(4)[0] == ([] if alone else [3])
    add(step(4, 2))
    assert records.take(5)[0] == [4]
    add(step(6))
    assert records.take_json(7) is None  # the record at 5 waits
    assert records.take(7)[0] == [5, 6]
    add(step(7))
    add(step(7, version=1))
    assert records.take_json(8) is None  # computed twice: the last record counts
    assert records.take(8) == ([7], [[1.0, 7.0, 1.0]])


def test_records_of_a_step_are_formatted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches numbers that are formatted for each request, and texts that differ from those of single records."""
    encoded: list[int] = []
    encode = msgspec.json.encode
    monkeypatch.setattr(step_rows, "_encode", lambda numbers: encoded.append(len(numbers)) or encode(numbers))
    rows = np.random.default_rng(0).standard_normal((200, 20), dtype="f4")
    rows[7, :3] = np.nan, np.inf, -0.0
    names = tuple(f"r{i}" for i in range(200))
    index = RowIndex(names, ((20,),) * 200, RECORDS)
    whole = StepRows(index, np.arange(200), np.ones(200, np.int64), rows.view(np.uint8))
    for i in (7, *range(200)):
        assert b"[" + b",".join(whole.record_json(f"r{i}", i) or ()) + b"]" == encode(rows[i].tolist())
    assert sum(encoded) == 200 * 20 and max(encoded) <= 1024
    assert whole.record_json("r7", 8) is None and whole.record_json("absent", 7) is None
