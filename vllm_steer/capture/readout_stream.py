# SPDX-License-Identifier: Apache-2.0
"""Readouts of a running sample, assembled from the records of its tokens: as arrays, and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.capture.readouts import FloatArray, Readouts, SteeringTrace
from vllm_steer.capture.row_assembler import RowAssembler
from vllm_steer.capture.row_receiver import RowReceiver
from vllm_steer.capture.step_rows import IntArray
from vllm_steer.program import Program
from vllm_steer.program.readouts import CompiledReadout
from vllm_steer.program.records import STOP_REASON_PREFIX
from vllm_steer.request.selector import Interval

_encode = msgspec.json.Encoder().encode
_NUMBER = re.compile(rb"\d+(?:\.0)?")


class ReadoutStream:
    """Readouts of one sample, whole and in deltas.

    Args:
        program: The request's program.
        assembler: Collects the sample's records.
        prompt_len: Number of prompt tokens.
    """

    def __init__(self, program: Program, assembler: RowAssembler, prompt_len: int) -> None:
        self.program = program
        self._assembler = assembler
        self._prompt_len = prompt_len
        self._groups = list(_groups(program, prompt_len))
        self._indices = set[int]().union(*(group.indices for group in self._groups))
        self._next_chunk = 0
        self._next_position = 0

    @property
    def has_trace(self) -> bool:
        """Whether the request has gated or live edits."""
        return bool(self.program.layout.gates or self.program.layout.live)

    def stopped_by(self, stop_reason: object) -> bool:
        """Return whether a request with this ``stop_reason`` was ended by a readout."""
        return bool(self.program.stops) and isinstance(stop_reason, str) and stop_reason.startswith(STOP_REASON_PREFIX)

    def next_delta(self, forwarded: int, *, drop: bool = False) -> dict[str, Readouts]:
        """Return the values of the tokens confirmed since the last delta.

        Records of later tokens are kept: they belong to drafts, or to tokens whose output is yet to be processed.

        Args:
            forwarded: Number of prompt and generated tokens with a record, without the last sampled one.
            drop: Whether records are not read again.
        """
        fresh, self._next_chunk = self._assembler.since(self._next_chunk, forwarded)
        first, self._next_position = self._next_position, max(self._next_position, forwarded)
        positions, records = fresh.records(forwarded)
        if drop:
            self._assembler.drop(self._next_chunk)
            self._next_chunk = 0
        start = int(np.searchsorted(positions, first))
        return self._readouts(positions[start:], records[start:])

    def next_json(self, receiver: RowReceiver, request_id: str, forwarded: int, *, drop: bool) -> bytes:
        """Return the values of `next_delta` as JSON, without readouts that have no new value; empty if none has one.

        Args:
            receiver: Buffers the records of all requests.
            request_id: The engine's id of the request.
            forwarded: See `next_delta`.
            drop: Whether records are not read again.
        """
        position = forwarded - 1
        if position == self._next_position:
            # Hot path: one new token, whose numbers have been formatted for all requests of the step at once.
            covering = [group for group in self._groups if group.covers(position)]
            numbers = receiver.record_json(request_id, position, take=drop) if covering else None
            if numbers is not None or not covering:
                self._next_position = forwarded
                return b"" if numbers is None else self._fill(covering, position, numbers)
        receiver.flush(request_id)
        values = self.next_delta(forwarded, drop=drop)
        found = {name: each for name, each in self.to_json(values).items() if each["positions"]}
        return _encode(found) if found else b""

    def to_json(self, values: dict[str, Readouts]) -> dict[str, Any]:
        """Return the values of all readouts as JSON types."""
        return {each.name: values[each.name].to_json(each.kind.columns) for each in self.program.readouts}

    def whole(self, forwarded: int) -> dict[str, Readouts]:
        """Return all values; ``forwarded`` as of `next_delta`."""
        return self._readouts(*self._assembler.records(forwarded))

    def trace(self, forwarded: int) -> SteeringTrace:
        """Return the trace, which is empty without gated and live edits; ``forwarded`` as of `next_delta`."""
        layout, (positions, records) = self.program.layout, self._assembler.records(forwarded)
        start = int(np.searchsorted(positions, self._prompt_len))
        positions, records = positions[start:], records[start:]
        live = {name: _columns(records, column, 1)[:, 0] for name, column in layout.live.items()}
        columns = [_columns(records, column, 1) for column in layout.gates.values()]
        gates = np.concatenate([np.empty((len(records), 0), np.float32), *columns], axis=1)
        covered = 0
        for place, number in enumerate(layout.gates):
            inside = _inside(positions, self.program.edits[number].selector.intervals(self._prompt_len))
            gates[~inside, place] = 0.0
            covered += int(inside.sum())
        return SteeringTrace(positions, gates, live, covered)

    def _readouts(self, positions: IntArray, records: FloatArray) -> dict[str, Readouts]:
        found = {}
        for group in self._groups:
            wanted = _inside(positions, group.intervals)
            if group.part:
                wanted &= _columns(records, group.part, 1)[:, 0] != 0
            chosen, rows = positions[wanted], records[wanted]
            for readout, column in group.readouts:
                found[readout.name] = _values(readout, chosen.copy(), _columns(rows, column, readout.width))
        return found

    def _fill(self, covering: list[_Group], position: int, numbers: list[bytes]) -> bytes:
        """Return the JSON of one position with the numbers of its record, behind which the position is put."""
        for column in self._indices:
            numbers[column] = numbers[column][:-2]  # an integer
        numbers[self.program.layout.width :] = (b"%d" % position,)  # records are as wide as the widest of their step
        members = [group.fill(numbers) for group in covering if not group.part or numbers[group.part] != b"0.0"]
        return b"{%b}" % b",".join(members) if members else b""


class _Group:
    """Consecutive readouts of a request that return the same tokens.

    Args:
        intervals: Positions that they return.
        part: Column that is 0 for other tokens; 0 for none.
        readouts: The readouts with their first columns.
        width: Number of columns of a record.
    """

    def __init__(
        self, intervals: tuple[Interval, ...], part: int, readouts: list[tuple[CompiledReadout, int]], width: int
    ) -> None:
        self.intervals, self.part, self.readouts = intervals, part, readouts
        self.indices: set[int] = set()
        """Columns that hold integers."""
        # The JSON of one position, as text and columns in turn; the position itself is behind the columns.
        texts, columns = [b""], list[int]()
        for readout, first in readouts:
            numbers = np.arange(first, first + readout.width, dtype=np.float32)
            sample = _encode(_values(readout, np.array([width]), numbers[None]).to_json(readout.kind.columns))
            before, *behind = _NUMBER.split(sample)
            texts[-1] += b"%b%b:%b" % (b"," if columns else b"", _encode(readout.name), before)
            texts += behind
            found = _NUMBER.findall(sample)
            columns += [int(float(each)) for each in found]
            self.indices.update(int(each) for each in found[1:] if not each.endswith(b".0"))
        self._parts = [b""] * (2 * len(columns) + 1)
        self._parts[::2] = texts
        self._choose = itemgetter(*columns)

    def covers(self, position: int) -> bool:
        """Return whether the readouts may return a position."""
        for start, stop in self.intervals:  # noqa: SIM110  # hot path: faster than any()
            if start <= position < stop:
                return True
        return False

    def fill(self, row: list[bytes]) -> bytes:
        """Return the members of a JSON object with the numbers of a record and its position."""
        parts = self._parts
        parts[1::2] = self._choose(row)
        return b"".join(parts)


def _groups(program: Program, prompt_len: int) -> Iterator[_Group]:
    layout = program.layout
    readouts = zip(program.readouts, layout.readouts, strict=True)
    for (_, parts), group in groupby(readouts, lambda each: (each[0].tokens, each[0].parts)):
        members = list(group)
        intervals = members[0][0].selector.intervals(prompt_len)
        yield _Group(intervals, layout.parts[parts] if parts else 0, members, layout.width)


def _values(readout: CompiledReadout, positions: IntArray, columns: FloatArray) -> Readouts:
    """Return the values of a readout from its columns."""
    if not readout.kind.has_head:
        return Readouts(positions, columns[:, 0] if readout.scalar else columns)
    shape = (len(positions), *((len(readout.layers),) if readout.kind.has_layers else ()), readout.top_k)
    both = columns.reshape(len(positions), len(readout.layers), 2, readout.top_k)
    return Readouts(
        positions, both[:, :, 1].reshape(shape).copy(), both[:, :, 0].reshape(shape).astype(np.int32)
    )  # fmt: skip


def _columns(records: FloatArray, column: int, width: int) -> FloatArray:
    """Return a copy of some columns; without records, an empty array of the right shape."""
    if not len(records):
        return np.empty((0, width), dtype=np.float32)
    return records[:, column : column + width].copy()


def _inside(positions: IntArray, intervals: tuple[Interval, ...]) -> npt.NDArray[np.bool_]:
    inside = np.zeros(len(positions), dtype=bool)
    for start, stop in intervals:
        inside |= (positions >= start) & (positions < stop)
    return inside
