# SPDX-License-Identifier: Apache-2.0
"""Readouts of one sample while it runs, as arrays and as JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from vllm_steer.capture import row_receiver, step_rows
from vllm_steer.capture.readout_stream import ReadoutStream
from vllm_steer.capture.readouts import Readouts, merge_readouts
from vllm_steer.capture.row_assembler import RowAssembler
from vllm_steer.capture.row_payload import RECORDS
from vllm_steer.capture.row_receiver import RowReceiver
from vllm_steer.capture.step_rows import RowIndex, StepRows
from vllm_steer.program.compiled_part import CompiledPart
from vllm_steer.program.program import Program
from vllm_steer.program.readouts import CompiledReadout

IDS = ("other", "own")
PROMPT = 3
PROBE = CompiledReadout("p", True, 2, 1, (0,), 0.0, False, "all")


class Sample:
    """The second of two requests; a record has the number of its request, its position and a version."""

    padding = 2
    """Columns of other requests of the step, whose records are wider."""

    def __init__(self, *readouts: CompiledReadout, drop: bool = False) -> None:
        self.program = Program(1, 8, (), (), (), (), readouts=readouts)
        self.width, self.drop = self.program.layout.width, drop
        self.index = RowIndex(IDS, ((self.width + self.padding,),) * 2, RECORDS)
        self.receiver = RowReceiver()
        self.assemblers = {name: RowAssembler(4, 8, torch.float32) for name in IDS}
        for name, assembler in self.assemblers.items():
            self.receiver.add_request(name, assembler)
        self.stream = ReadoutStream(self.program, self.assemblers["own"], PROMPT)

    def step(self, start: int, count: int = 1, version: int = 0) -> None:
        records = [[0.0, 100 * r + start + i, version] for r in range(2) for i in range(count)]
        self.add(start, [record[: self.width] for record in records])

    def add(self, start: int, records: list[list[float]]) -> None:
        count = len(records) // 2
        records = [[*record, *[0.0] * self.padding] for record in records]
        data = np.array(records, np.float32).view(np.uint8)
        self.receiver.add_step(StepRows(self.index, np.full(2, start), np.full(2, count), data))

    def text(self, forwarded: int) -> bytes:
        return self.stream.next_json(self.receiver, "own", forwarded, drop=self.drop)

    def take(self, forwarded: int) -> Any:
        """Return the new positions of the probe and their values."""
        probe = json.loads(self.text(forwarded) or b"{}").get("p", {"positions": [], "values": []})
        return probe["positions"], [value - 100 for value in probe["values"]]


@pytest.fixture(params=[True, False], ids=["dropped", "kept"])
def sample(request: pytest.FixtureRequest) -> Sample:
    """Return a sample whose records are dropped after they were read, as in a stream without captures, or kept."""
    return Sample(PROBE, drop=request.param)


def test_every_value_is_read_once(sample: Sample) -> None:
    """Catches values of another request, of another token, or read twice."""
    sample.step(0, 4)
    assert sample.take(4) == ([0, 1, 2, 3], [0, 1, 2, 3])
    sample.step(4)
    assert sample.take(5) == ([4], [4])
    assert sample.take(5) == ([], [])
    sample.step(5)
    sample.step(6)
    assert sample.take(7) == ([5, 6], [5, 6])


@pytest.mark.parametrize("assembled", [False, True])
def test_unconfirmed_records_wait(sample: Sample, assembled: bool) -> None:
    """Catches (1) values of rejected drafts and (2) values lost because they arrive ahead of their output."""
    if assembled:
        sample.receiver.record_json = lambda *_, **__: None  # type: ignore[method-assign]
    sample.step(0, 3)
    assert sample.take(1)[0] == [0]
    sample.add(2, [[0.0, 0.0]] * 3 + [[0.0, 102.5], [0.0, 103.0], [0.0, 104.0]])
    assert sample.take(4) == ([1, 2, 3], [1, 2.5, 3])
    sample.add(4, [[0.0, 0.0], [0.0, 104.5]])
    assert sample.take(5) == ([4], [4.5])
    for position in (5, 6):
        sample.step(position)
        assert sample.take(position + 1) == ([position], [position])


def test_recomputed_positions_are_skipped(sample: Sample) -> None:
    """Catches positions that a preempted request streams a second time, and an older value that wins."""
    sample.step(0, 4)
    assert sample.take(4)[0] == [0, 1, 2, 3]
    sample.step(0, 5)
    assert sample.take(5) == ([4], [4])
    sample.step(5)
    sample.add(5, [[0.0, 0.0], [0.0, 105.5]])
    assert sample.take(6) == ([5], [5.5])


def test_values_survive_a_full_buffer(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches values lost or out of order when the buffer is emptied, and when the request has finished."""
    sample.step(0, 2)
    assert sample.take(1)[0] == [0]
    monkeypatch.setattr(row_receiver, "MAX_BYTES", 0)
    sample.step(2)
    monkeypatch.undo()
    sample.step(3)
    sample.receiver.finish_request("own")
    assert sample.take(4) == ([1, 2, 3], [1, 2, 3])
    assert sample.take(5) == ([], [])


def test_new_tokens_are_not_assembled(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a pass over arrays for each event of each stream, and kept records that are lost for the trace."""
    sample.step(0, 3)
    assert sample.take(3)[0] == [0, 1, 2]
    with monkeypatch.context() as patched:
        patched.setattr(RowReceiver, "flush", lambda *_: pytest.fail("assembled"))
        for position in (3, 4, 5):
            sample.step(position)
            assert sample.take(position + 1) == ([position], [position])
        for position in (6, 7, 8):
            sample.step(position)
        assert sample.take(9) == ([6, 7, 8], [6, 7, 8])
    sample.receiver.flush("own")
    whole = sample.stream.whole(9)["p"].positions.tolist()
    assert whole == ([] if sample.drop else list(range(9)))


def test_other_requests_do_not_delay_a_stream(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches values that are assembled, lost or doubled when steps are merged or run ahead.

    Steps of several tokens are merged because another request ended, or the records of a token are there before its
    output.
    """
    sample.step(0, 3)
    assert sample.take(3)[0] == [0, 1, 2]
    flush = RowReceiver.flush
    monkeypatch.setattr(RowReceiver, "flush", lambda self, name: flush(self, name) if name != "own" else pytest.fail())
    for position in (3, 4):
        sample.step(position)
    sample.receiver.flush("other")
    assert [step.count[0] for step in sample.receiver._steps][-1] == 2
    assert sample.take(4) == ([3], [3])
    sample.step(5)
    assert sample.take(5) == ([4], [4])
    sample.receiver.flush("other")
    sample.step(6)
    assert sample.take(7) == ([5, 6], [5, 6])
    monkeypatch.undo()
    sample.step(7)
    sample.receiver.finish_request("own")
    assert sample.take(8) == ([7], [7])
    whole = sample.stream.whole(8)["p"].positions.tolist()
    assert whole == list(range(8)) or sample.drop


def heads() -> list[CompiledReadout]:
    """Return readouts of every kind; some return other tokens."""
    change = msgspec.structs.replace
    return [
        change(PROBE, name='p"%b'),
        change(PROBE, name="generated", tokens="generated"),
        change(PROBE, name="two", scalar=False, vectors=(0, 1)),
        change(PROBE, name="lens", scalar=False, vectors=(), head="lens", top_k=2, layers=(1, 3)),
        change(PROBE, name="sae", scalar=False, vectors=(), head="sae:a", top_k=2, layers=(1,), tokens=[[4, 5]]),
    ]


def test_json_of_every_kind() -> None:
    """Catches token ids as floats, layers in one list, values beside the wrong indices, and a template that differs."""
    record = [0.0, 0.5, 1.5, 2.5, 3.5, 7.0, 3.0, -0.5, -1.5, 2.0, 9.0, -0.25, -4.0, 7.0, -1.0, 2.5, 0.0]
    head = {"token_ids": [[[7, 3], [2, 9]]], "logprobs": [[[-0.5, -1.5], [-0.25, -4.0]]]}
    expected = {
        'p"%b': {"values": [0.5]},
        "generated": {"values": [1.5]},
        "two": {"values": [[2.5, 3.5]]},
        "lens": head,
        "sae": {"indices": [[7, -1]], "values": [[2.5, 0.0]]},
    }
    formatted, assembled = Sample(*heads()), Sample(*heads())
    assembled.receiver.record_json = lambda *_, **__: None  # type: ignore[method-assign]
    for each in (formatted, assembled):
        each.add(0, [record] * 2 * 2)
        assert list(json.loads(each.text(2))) == ['p"%b', "two", "lens"]
    for position in range(2, 6):
        for each in (formatted, assembled):
            each.add(position, [record] * 2)
        text = formatted.text(position + 1)
        assert text == assembled.text(position + 1)
        names = [
            name for name in expected if (name != "generated" or position >= 3) and (name != "sae" or position == 4)
        ]
        assert json.loads(text) == {name: {"positions": [position], **expected[name]} for name in names}
    assert text.index(b"lens") > text.index(b"two")
    for name, values in json.loads(text).items():
        assert json.loads(json.dumps(Readouts.from_json(values).to_json(tuple(values)[1:]))) == values, name


def test_merged_readouts_are_in_order() -> None:
    """Catches tokens of a lens beside the positions of others when vLLM merges outputs that a client has not read."""
    parts = [{"top": {"positions": [i], "token_ids": [[i + 5]], "logprobs": [[-i - 0.5]]}} for i in range(2)]
    both = merge_readouts(*({"top": Readouts.from_json(part["top"])} for part in parts))
    assert both is not None and both["top"].to_json(("token_ids", "logprobs")) == {
        "positions": [0, 1], "token_ids": [[5], [6]], "logprobs": [[-0.5], [-1.5]]
    }  # fmt: skip


def test_json_of_several_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches numbers of one token beside the position of another, in an event that covers several tokens."""
    formatted, assembled = Sample(*heads()), Sample(*heads())
    assembled.receiver.record_json = lambda *_, **__: None  # type: ignore[method-assign]
    random, position = np.random.default_rng(0), 0
    monkeypatch.setattr(formatted.receiver, "flush", lambda *_: pytest.fail("assembled"))
    for count in (2, 1, 3, 2, 8):
        for _ in range(count):
            record = (np.round(random.uniform(-9, 9, formatted.width)) + 0.0).tolist()
            for each in (formatted, assembled):
                each.add(position, [record] * 2)
            position += 1
        text = formatted.text(position)
        assert text == assembled.text(position)
        assert json.loads(text)['p"%b']["positions"] == list(range(position - count, position))


@pytest.mark.parametrize("assembled", [False, True])
def test_tokens_outside_of_a_part(assembled: bool) -> None:
    """Catches values of tokens outside of the part of the output to which a readout is restricted."""
    own = Sample(PROBE, msgspec.structs.replace(PROBE, name="part", parts=(CompiledPart("", 7, 8, False, False),)))
    (column,) = own.program.layout.parts.values()
    own.add(0, [[0.0] * own.width] * 2)
    own.text(1)
    if assembled:
        own.receiver.record_json = lambda *_, **__: None  # type: ignore[method-assign]
    for position in (1, 2):
        record = [0.0] * own.width
        record[column] = float(position == 2)
        own.add(position, [record] * 2)
        assert list(json.loads(own.text(position + 1))) == (["p", "part"] if position == 2 else ["p"])
    for position in (3, 4, 5):
        record[column] = float(position != 4)
        own.add(position, [record] * 2)
    found = json.loads(own.text(6))
    assert found["p"]["positions"] == [3, 4, 5] and found["part"]["positions"] == [3, 5]


def test_numbers_of_a_step_are_formatted_once(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert b"[" + b",".join(whole.record_json(i)) + b"]" == encode(rows[i].tolist())
    assert sum(encoded) == 200 * 20 and max(encoded) <= 1024
    twice = StepRows(
        RowIndex(("r",) * 2, ((20,),) * 2, RECORDS), np.array([0, 5]), np.ones(2, np.int64), whole.rows[:2]
    )
    receiver, assembler = RowReceiver(), RowAssembler(4, 8, torch.float32)
    receiver.add_request("r", assembler)
    earlier = StepRows(RowIndex(("r",), ((20,),), RECORDS), np.array([5]), np.ones(1, np.int64), whole.rows[:1])
    for each in (earlier, twice):  # the newest step decides, not an earlier one with the same position
        receiver.add_step(each)
    assert receiver.record_json("r", 5, 6, take=False) is None
    wide = StepRows(RowIndex(names[:2], ((2000,),) * 2, RECORDS), np.array([4, 9]), np.ones(2, np.int64),
                    rows.reshape(2, 2000).view(np.uint8))  # fmt: skip
    assert b"[" + b",".join(wide.record_json(1)) + b"]" == encode(rows[100:].reshape(-1).tolist())
