# SPDX-License-Identifier: Apache-2.0
"""Splitting of buffered steps by request in the front end."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.engine import EngineCoreOutput

from vllm_steer.capture import row_receiver, step_rows
from vllm_steer.capture.row_assembler import RowAssembler, RowChunk
from vllm_steer.capture.row_payload import RECORDS, ROWS_REQUEST_ID, encode_missing_reason, encode_step
from vllm_steer.capture.row_receiver import RowReceiver
from vllm_steer.capture.step_rows import RowIndex, StepRows, merge_steps

CODES = (4, 10)


def step(
    position: int, *names: str, codes: tuple[int, ...] = CODES, count: int = 1, projection: bytes = b""
) -> StepRows:
    """Return a step with ``count`` positions per request. Rows identify request, position and site."""
    rows = [(ord(name), position + i, code) for name in names for i in range(count) for code in codes]
    return StepRows(
        RowIndex(names, (codes,) * len(names), projection),
        np.full(len(names), position, dtype=np.int64),
        np.full(len(names), count, dtype=np.int64),
        np.array(rows, dtype=np.uint8),
    )


def rows_output(step: StepRows) -> EngineCoreOutput:
    return EngineCoreOutput(ROWS_REQUEST_ID, [], kv_transfer_params=encode_step(step), routed_experts=step.rows)


class FrontEnd:
    """A receiver and the assemblers of running requests."""

    def __init__(self, *request_ids: str) -> None:
        self.receiver = RowReceiver()
        self.assemblers = {name: RowAssembler(2, 4, torch.float32) for name in request_ids}
        for name, assembler in self.assemblers.items():
            self.receiver.add_request(name, assembler)

    def step(self, *steps: StepRows) -> None:
        other = EngineCoreOutput("x", [])
        assert self.receiver.receive([*map(rows_output, steps), other]) == [other]

    def chunks(self, name: str) -> list[RowChunk]:
        chunks = self.assemblers[name]._chunks
        return [msgspec.structs.replace(chunk, rows=bytes(memoryview(chunk.rows).cast("B"))) for chunk in chunks]

    def finish(self, name: str) -> list[RowChunk]:
        self.receiver.finish_request(name)
        return self.chunks(name)


def expected(name: str, start: int, count: int, codes: tuple[int, ...] = CODES, projection: bytes = b"") -> RowChunk:
    rows = bytes(value for i in range(count) for code in codes for value in (ord(name), start + i, code))
    return RowChunk(name, start, count, codes, rows, projection)


def test_finished_request_takes_its_rows() -> None:
    """Catches rows of a neighbour, rows lost between steps, and rows delivered twice."""
    front = FrontEnd("a", "b")
    front.step(step(0, "a", "b", count=3))
    front.step(step(3, "b", "a"))
    front.step(step(4, "a", "b"))
    assert front.finish("a") == [expected("a", 0, 5)]
    front.step(step(5, "b"))
    assert front.finish("b") == [expected("b", 0, 6)]
    assert front.receiver.num_bytes == 0


def test_recomputed_positions_start_a_new_chunk() -> None:
    """Catches recomputed rows (preemption, drafts) attributed to later positions."""
    front = FrontEnd("a")
    front.step(step(0, "a", count=4))
    front.step(step(2, "a", count=2))
    front.step(step(4, "a"))
    assert front.finish("a") == [expected("a", 0, 4), expected("a", 2, 3)]


def test_pipeline_stages_and_projections_have_separate_chunks() -> None:
    """Catches interleaved rows of two pipeline stages, and projections among rows."""
    front = FrontEnd("a")
    for position in range(2):
        steps = step(position, "a", codes=(0,)), step(position, "a", codes=(6,)), step(position, "a", projection=b"p")
        front.step(*steps)
    assert front.finish("a") == [
        expected("a", 0, 2, (0,)), expected("a", 0, 2, (6,)), expected("a", 0, 2, projection=b"p")
    ]  # fmt: skip


def test_records_of_other_widths_start_a_new_chunk() -> None:
    """Catches records of different widths in one chunk, and a record that hides one that was computed after it."""
    front = FrontEnd("a")
    for position, record in ((0, [1, 2]), (1, [3, 4, 0]), (1, [5, 6])):
        index = RowIndex(("a",), ((len(record),),), RECORDS)
        rows = np.array([record], np.float32).view(np.uint8)
        front.receiver.add_step(StepRows(index, np.array([position]), np.array([1]), rows))
    assert [chunk.start for chunk in front.finish("a")] == [0, 1, 1]
    assert front.assemblers["a"].records(2)[1].tolist() == [[1, 2], [5, 6]]


@pytest.mark.parametrize("limit", ["MAX_STEPS", "MAX_BYTES"])
def test_buffer_is_bounded(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches steps that stay in memory as long as one of their requests runs."""
    monkeypatch.setattr(row_receiver, limit, 3)
    front = FrontEnd("a", "b")
    for position in range(10):
        front.step(step(position, "a", "b"))
        assert len(front.receiver._steps) <= 3
    for name in "ab":
        assert b"".join(chunk.rows for chunk in front.finish(name)) == expected(name, 0, 10).rows
    assert front.receiver.num_bytes == 0


def test_the_newest_record_stays_in_a_full_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a full buffer that is emptied with the step that the events of all streams read next."""
    monkeypatch.setattr(row_receiver, "MAX_STEPS", 3)
    receiver, assembler = RowReceiver(), RowAssembler(0, 0, torch.float32)
    receiver.add_request("a", assembler)
    for position in range(8):
        record = np.array([[0, position]], dtype=np.float32).view(np.uint8)
        index = RowIndex(("a",), ((2,),), RECORDS)
        receiver.add_step(StepRows(index, np.array([position]), np.array([1]), record))
        assert receiver.record_json("a", position, position + 1, take=False) == [[b"0.0", b"%d.0" % position]]
    assert receiver.record_json("a", 6, 8, take=False) == [[b"0.0", b"6.0"], [b"0.0", b"7.0"]]
    assert receiver.record_json("a", 4, 8, take=False) is None, "the assembler has the records of 4 and 5"


def test_chunks_own_their_memory() -> None:
    """Catches views that keep the rows of all requests of a step alive."""
    front = FrontEnd("a", "b")
    front.step(step(0, "a", "b"))
    front.receiver.finish_request("a")
    (chunk,) = front.assemblers["a"]._chunks
    assert chunk.rows.base is None and chunk.rows.nbytes == 3 * len(CODES)


def test_large_chunks_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a copy of each long prompt's rows, and a few rows that keep a long prompt's rows in memory."""
    monkeypatch.setattr(row_receiver, "_SHARED_BYTES", 12)
    front = FrontEnd("a", "b")
    long = step(0, "a", "b", count=3)
    steps = long.select([0]), long, step(3, "a", count=2)
    for number, shared in enumerate((True, False, False)):
        front.receiver._clear()
        front.receiver.add_step(steps[number])
        front.receiver.flush("a")
        assert np.shares_memory(front.assemblers["a"]._chunks[-1].rows, steps[number].rows) == shared
    assert front.chunks("a") == [expected("a", 0, 3), expected("a", 0, 3), expected("a", 3, 2)]


def test_steps_of_a_steady_batch_are_merged() -> None:
    """Catches a pass over all steps for every finishing request: the first one merges them."""
    front = FrontEnd("a", "b", "c")
    for position in range(6):
        front.step(step(position, "a", "b", "c"))
    assert front.finish("a") == [expected("a", 0, 6)]
    assert len(front.receiver._steps) == 1
    front.step(step(6, "b", "c"), step(7, "b", "c"))
    assert front.finish("c") == [expected("c", 0, 8)]
    assert len(front.receiver._steps) == 2
    assert front.finish("b") == [expected("b", 0, 8)]


def num_merged(*steps: StepRows) -> int:
    return len(merge_steps(steps))


def test_only_consecutive_steps_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches merging of recomputed positions, other request orders, unequal entries, other sites and large rows."""
    index = step(0, "a", "b").index

    def at(position: int, **about: Any) -> StepRows:
        return dataclasses.replace(step(position, "a", "b", **about), index=index)

    assert num_merged(at(0), at(1), at(2)) == 1
    assert num_merged(at(0), at(2)) == num_merged(at(1), at(1)) == 2
    assert num_merged(at(0, count=2), at(2)) == 2
    assert num_merged(at(0, count=2), dataclasses.replace(at(2, count=2), count=np.array([1, 3]))) == 2
    assert num_merged(at(0), step(1, "b", "a")) == 2
    assert num_merged(at(0), step(1, "a", codes=(0,)), at(1)) == 3
    assert num_merged(dataclasses.replace(at(0), start=np.array([0, 5])), at(1)) == 2
    unequal = dataclasses.replace(at(0), index=RowIndex(("a", "b"), ((4,), (4, 6, 10))))
    assert num_merged(unequal, dataclasses.replace(unequal, start=unequal.start + 1)) == 2
    monkeypatch.setattr(step_rows, "_MAX_MERGED_ENTRY_BYTES", 5)
    assert num_merged(at(0), at(1)) == 2


KINDS = [
    RowIndex(tuple(names), codes, projection)
    for names, codes, projection in (
        ("ab", ((0,), (0,)), b""),
        ("ba", ((0,), (0,)), b""),
        ("ab", ((0,), (0,)), b"p"),
        ("ab", ((0,), (0, 2, 4)), b""),
    )
]
STEP = st.tuples(st.sampled_from(KINDS), st.sampled_from((1, 1, 1, 2)), st.integers(0, 2))


def run(actions: list[Any]) -> list[dict[tuple[bytes, int, int], bytes]]:
    """Run a sequence of actions and return the rows of each request.

    An action is a request id, which flushes that request, or a step: its index, the number of positions, and the number
    of positions that it goes back.
    """
    front, position = FrontEnd("a", "b"), 0
    for number, action in enumerate(actions):
        if isinstance(action, str):
            front.receiver.flush(action)
            continue
        kind, count, back = action
        position = max(position - back, 0)
        one, each = np.ones(2, dtype=np.int64), count * int(kind.widths.sum())
        rows = np.stack([np.full(each, number), np.arange(each)], axis=1).astype(np.uint8)
        front.step(StepRows(kind, position * one, count * one, rows))
        position += count
    return [last_rows(front.finish(name)) for name in "ab"]


@given(st.lists(STEP | st.sampled_from("ab"), max_size=14))
def test_merging_does_not_change_the_rows(actions: list[Any]) -> None:
    """Catches rows of another request, position, site or format, and an older row that wins."""
    found = run(actions)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(row_receiver, "merge_steps", list)
        assert run(actions) == found


def last_rows(chunks: list[RowChunk]) -> dict[tuple[bytes, int, int], bytes]:
    """Return the last row of each position, by format and site."""
    found = {}
    for chunk in chunks:
        rows = np.frombuffer(chunk.rows, np.uint8).reshape(chunk.count, len(chunk.captures), -1)
        for i in range(chunk.count):
            for place, capture in enumerate(chunk.captures):
                found[chunk.projection, capture, chunk.start + i] = rows[i, place].tobytes()
    return found


def test_flush() -> None:
    """Catches rows that a stream receives late or twice."""
    front = FrontEnd("a", "b")
    front.step(step(0, "a", "b", count=2))
    front.receiver.flush("a")
    assert front.chunks("a") == [expected("a", 0, 2)]
    front.step(step(2, "a", "b"))
    front.receiver.flush("a")
    assert front.chunks("a") == [expected("a", 0, 2), expected("a", 2, 1)]
    front.step(step(3, "a", "b"))
    assert front.finish("a")[2:] == [expected("a", 3, 1)]
    assert front.finish("b") == [expected("b", 0, 4)]


def test_finished_and_aborted_requests_leave_nothing() -> None:
    """Catches rows kept from the surplus step of async scheduling, and rows of aborted requests."""
    front = FrontEnd("a")
    front.step(step(0, "a"))
    front.receiver.finish_request("a")
    front.step(step(1, "a"))
    assert front.receiver.num_bytes == 0
    front.assemblers["b"] = RowAssembler(2, 4, torch.float32)
    front.receiver.add_request("b", front.assemblers["b"])
    front.step(step(0, "b"))
    assert front.receiver.num_bytes
    del front.assemblers["b"]  # an abort drops vLLM's request state
    gc.collect()
    assert (front.receiver.num_bytes, front.receiver._assemblers) == (0, {})


EXIT_WITH_A_RUNNING_REQUEST = """
import sys
from types import SimpleNamespace
import torch
from vllm_steer.capture.row_assembler import RowAssembler
from vllm_steer.frontend import outputs

processor = SimpleNamespace()
assembler = RowAssembler(2, 4, torch.float32)
outputs.receiver_of(processor).add_request("a", assembler)
sys._kept = [processor, assembler]  # freed after all modules have been cleared, and before sys.stderr
"""


def test_exit_with_a_running_request_is_quiet() -> None:
    """Catches ``Exception ignored in ...`` at the exit of an interrupted process: a callback into a cleared module."""
    done = subprocess.run(
        [sys.executable, "-c", EXIT_WITH_A_RUNNING_REQUEST], capture_output=True, text=True, check=True
    )
    assert "ignored" not in done.stderr


def test_reused_request_id() -> None:
    """Catches rows of an earlier request with the same id."""
    front = FrontEnd("a", "b")
    front.step(step(0, "a", "b"))
    front.receiver.finish_request("a")
    front.assemblers["a"] = RowAssembler(2, 4, torch.float32)
    front.receiver.add_request("a", front.assemblers["a"])
    front.step(step(7, "a", "b"))
    assert front.finish("a") == [expected("a", 7, 1)]


def test_missing_reason_is_passed_on() -> None:
    """Catches a lost reason: the error would only state the number of missing rows."""
    front = FrontEnd("a")
    front.receiver.receive(
        [EngineCoreOutput(ROWS_REQUEST_ID, [], kv_transfer_params=encode_missing_reason("a", "no room"))]
    )
    assert front.assemblers["a"].missing_reason == "no room"
