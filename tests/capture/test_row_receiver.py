# SPDX-License-Identifier: Apache-2.0
"""Whole steps in the front end's process, and what each request takes out of them."""

from __future__ import annotations

import dataclasses
import gc
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
from vllm_steer.capture.row_payload import ROWS_REQUEST_ID, encode_missing_reason, encode_step
from vllm_steer.capture.row_receiver import RowReceiver
from vllm_steer.capture.step_rows import RowIndex, StepRows, merge_steps

CODES = (4, 10)


def step(
    position: int, *names: str, codes: tuple[int, ...] = CODES, count: int = 1, projection: bytes = b""
) -> StepRows:
    """A step in which each request stores ``count`` positions; a row says whose it is, where, and of which site."""
    rows = [(ord(name), position + i, code) for name in names for i in range(count) for code in codes]
    return StepRows(
        RowIndex(names, (codes,) * len(names), projection),
        np.full(len(names), position, dtype=np.int64),
        np.full(len(names), count, dtype=np.int64),
        np.array(rows, dtype=np.uint8),
    )


def carrier(step: StepRows) -> EngineCoreOutput:
    return EngineCoreOutput(ROWS_REQUEST_ID, [], kv_transfer_params=encode_step(step), routed_experts=step.rows)


class FrontEnd:
    """An inbox and the assemblers of the requests that run."""

    def __init__(self, *live: str) -> None:
        self.box = RowReceiver()
        self.live = {name: RowAssembler(2, 4, torch.float32) for name in live}
        for name, assembler in self.live.items():
            self.box.add_request(name, assembler)

    def step(self, *steps: StepRows) -> None:
        of_a_request = EngineCoreOutput("x", [])
        assert self.box.receive([*map(carrier, steps), of_a_request]) == [of_a_request]

    def got(self, name: str) -> list[RowChunk]:
        chunks = self.live[name]._chunks
        return [msgspec.structs.replace(chunk, rows=bytes(memoryview(chunk.rows).cast("B"))) for chunk in chunks]

    def end(self, name: str) -> list[RowChunk]:
        self.box.finish_request(name)
        return self.got(name)


def expected(name: str, start: int, count: int, codes: tuple[int, ...] = CODES, projection: bytes = b"") -> RowChunk:
    rows = bytes(value for i in range(count) for code in codes for value in (ord(name), start + i, code))
    return RowChunk(name, start, count, codes, rows, projection)


def test_a_request_takes_its_own_rows_when_it_ends() -> None:
    """Catches rows of a neighbour, rows that are lost between steps, and rows that are handed out twice."""
    front = FrontEnd("a", "b")
    front.step(step(0, "a", "b", count=3))
    front.step(step(3, "b", "a"))
    front.step(step(4, "a", "b"))
    assert front.end("a") == [expected("a", 0, 5)]
    front.step(step(5, "b"))
    assert front.end("b") == [expected("b", 0, 6)]
    assert front.box.num_bytes == 0


def test_positions_that_come_again_are_a_chunk_of_their_own() -> None:
    """Catches rows after a preemption, or of rejected drafts, that are taken for those of later positions."""
    front = FrontEnd("a")
    front.step(step(0, "a", count=4))
    front.step(step(2, "a", count=2))
    front.step(step(4, "a"))
    assert front.end("a") == [expected("a", 0, 4), expected("a", 2, 3)]


def test_stages_of_a_pipeline_and_projections_are_joined_apart() -> None:
    """Catches one stage's rows in the middle of another's, and products among rows."""
    front = FrontEnd("a")
    for position in range(2):
        steps = step(position, "a", codes=(0,)), step(position, "a", codes=(6,)), step(position, "a", projection=b"p")
        front.step(*steps)
    assert front.end("a") == [
        expected("a", 0, 2, (0,)), expected("a", 0, 2, (6,)), expected("a", 0, 2, projection=b"p")
    ]  # fmt: skip


@pytest.mark.parametrize("limit", ["MAX_STEPS", "MAX_BYTES"])
def test_what_is_kept_is_bounded(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches steps that are kept for as long as one request of them runs."""
    monkeypatch.setattr(row_receiver, limit, 3)
    front = FrontEnd("a", "b")
    for position in range(10):
        front.step(step(position, "a", "b"))
        assert len(front.box._steps) <= 3
    for name in "ab":
        assert b"".join(chunk.rows for chunk in front.end(name)) == expected(name, 0, 10).rows
    assert front.box.num_bytes == 0


def test_what_a_request_keeps_is_its_own() -> None:
    """Catches rows that look into a whole step, and with it keep the rows of all others alive."""
    front = FrontEnd("a", "b")
    front.step(step(0, "a", "b"))
    front.box.finish_request("a")
    (chunk,) = front.live["a"]._chunks
    assert chunk.rows.base is None and chunk.rows.nbytes == 3 * len(CODES)


def test_steps_of_a_settled_batch_are_brought_together() -> None:
    """Catches a request that goes through all steps by itself: rows lie together when the first one takes its own."""
    front = FrontEnd("a", "b", "c")
    for position in range(6):
        front.step(step(position, "a", "b", "c"))
    assert front.end("a") == [expected("a", 0, 6)]
    assert len(front.box._steps) == 1
    front.step(step(6, "b", "c"), step(7, "b", "c"))
    assert front.end("c") == [expected("c", 0, 8)]
    assert len(front.box._steps) == 2
    assert front.end("b") == [expected("b", 0, 8)]


def together(*steps: StepRows) -> int:
    return len(merge_steps(steps))


def test_only_what_follows_is_brought_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches positions that came again taken for later ones, requests in another order, entries of unequal length,
    other sites, and copies of rows that are large."""
    entries = step(0, "a", "b").index

    def at(position: int, **about: Any) -> StepRows:
        return dataclasses.replace(step(position, "a", "b", **about), index=entries)

    assert together(at(0), at(1), at(2)) == 1
    assert together(at(0), at(2)) == together(at(1), at(1)) == 2
    assert together(at(0, count=2), at(2)) == 2
    assert together(at(0), step(1, "b", "a")) == 2
    assert together(at(0), step(1, "a", codes=(0,)), at(1)) == 3
    assert together(dataclasses.replace(at(0), start=np.array([0, 5])), at(1)) == 2
    unlike = dataclasses.replace(at(0), index=RowIndex(("a", "b"), ((4,), (4, 6, 10))))
    assert together(unlike, dataclasses.replace(unlike, start=unlike.start + 1)) == 2
    monkeypatch.setattr(step_rows, "_MAX_MERGED_ENTRY_BYTES", 5)
    assert together(at(0), at(1)) == 2


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


def served(doings: list[Any]) -> list[dict[tuple[bytes, int, int], bytes]]:
    """What each request has after these: steps of a kind, of so many positions, that go back so many; or a request that
    takes what has come for it."""
    front, position = FrontEnd("a", "b"), 0
    for number, doing in enumerate(doings):
        if isinstance(doing, str):
            front.box.flush(doing)
            continue
        kind, count, back = doing
        position = max(position - back, 0)
        one, each = np.ones(2, dtype=np.int64), count * int(kind.widths.sum())
        rows = np.stack([np.full(each, number), np.arange(each)], axis=1).astype(np.uint8)
        front.step(StepRows(kind, position * one, count * one, rows))
        position += count
    return [laid_out(front.end(name)) for name in "ab"]


@given(st.lists(STEP | st.sampled_from("ab"), max_size=14))
def test_a_request_gets_the_same_whether_or_not_steps_are_brought_together(doings: list[Any]) -> None:
    """Catches rows of a neighbour, of another position, site or form, and an order in which an older one counts."""
    found = served(doings)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(row_receiver, "merge_steps", list)
        assert served(doings) == found


def laid_out(chunks: list[RowChunk]) -> dict[tuple[bytes, int, int], bytes]:
    """The row that counts at each position, by form and site: the last one."""
    found = {}
    for chunk in chunks:
        rows = np.frombuffer(chunk.rows, np.uint8).reshape(chunk.count, len(chunk.captures), -1)
        for i in range(chunk.count):
            for place, capture in enumerate(chunk.captures):
                found[chunk.projection, capture, chunk.start + i] = rows[i, place].tobytes()
    return found


def test_rows_as_they_come() -> None:
    """Catches a stream that gets rows late, or again."""
    front = FrontEnd("a", "b")
    front.step(step(0, "a", "b", count=2))
    front.box.flush("a")
    assert front.got("a") == [expected("a", 0, 2)]
    front.step(step(2, "a", "b"))
    front.box.flush("a")
    assert front.got("a") == [expected("a", 0, 2), expected("a", 2, 1)]
    front.step(step(3, "a", "b"))
    assert front.end("a")[2:] == [expected("a", 3, 1)]
    assert front.end("b") == [expected("b", 0, 4)]


def test_the_dead_take_nothing_and_leave_nothing() -> None:
    """Catches the surplus step of asynchronous scheduling, and rows of aborted requests that stay."""
    front = FrontEnd("a")
    front.step(step(0, "a"))
    front.box.finish_request("a")
    front.step(step(1, "a"))
    assert front.box.num_bytes == 0
    front.live["b"] = RowAssembler(2, 4, torch.float32)
    front.box.add_request("b", front.live["b"])
    front.step(step(0, "b"))
    assert front.box.num_bytes
    del front.live["b"]  # as an abort does, with vLLM's state of the request
    gc.collect()
    assert (front.box.num_bytes, front.box._assemblers) == (0, {})


def test_a_request_that_joins_takes_nothing_of_what_was_before() -> None:
    """Catches the rows of an earlier request of the same id."""
    front = FrontEnd("a", "b")
    front.step(step(0, "a", "b"))
    front.box.finish_request("a")
    front.live["a"] = RowAssembler(2, 4, torch.float32)
    front.box.add_request("a", front.live["a"])
    front.step(step(7, "a", "b"))
    assert front.end("a") == [expected("a", 7, 1)]


def test_why_rows_are_missing_is_said() -> None:
    """Catches a reason that is lost, so that the status says only how many rows are missing."""
    front = FrontEnd("a")
    front.box.receive([EngineCoreOutput(ROWS_REQUEST_ID, [], kv_transfer_params=encode_missing_reason("a", "no room"))])
    assert front.live["a"]._missing_reason == "no room"
