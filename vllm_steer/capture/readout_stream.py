# SPDX-License-Identifier: Apache-2.0
"""Readouts of a running sample, assembled from the records of its tokens: as arrays, and as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.capture.readouts import FloatArray, Readouts, SteeringTrace
from vllm_steer.capture.row_assembler import RowAssembler
from vllm_steer.capture.row_receiver import RowReceiver
from vllm_steer.capture.step_rows import MAX_NUMBERS, IntArray
from vllm_steer.program import Program
from vllm_steer.program.readouts import CompiledReadout
from vllm_steer.program.records import STOP_REASON_PREFIX
from vllm_steer.request.selector import OPEN_END, Interval, Selector

_encode = msgspec.json.Encoder().encode
_NUMBER = re.compile(rb"\d+(?:\.0)?")
_END = b"]}"
_POSITION = b"\0"
"""Place of the position in a template: JSON has no such byte."""
_SHAPES = "_readout_shapes"
"""Attribute of a program for :func:`_shapes`: many requests have the same program."""
_MAX_POSITIONS = 8
"""Tokens of an event up to which numbers are formatted with those of other requests, however wide records are."""


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
        self._width = program.layout.width
        self._max_positions = max(_MAX_POSITIONS, MAX_NUMBERS // max(1, self._width))
        self._groups = [_Group(selector.intervals(prompt_len), shape) for selector, shape in _shapes(program)]
        self._indices = set[int]().union(*(group.shape.template.indices for group in self._groups))
        self._all_covered_from = max((group.open_from for group in self._groups), default=0)
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
            forwarded: Number of prompt and generated tokens with a record, without the last sampled one. It never
                decreases: a preempted request keeps its tokens.
            drop: Whether records are not read again.
        """
        fresh, self._next_chunk = self._assembler.since(self._next_chunk, forwarded)
        first, self._next_position = self._next_position, forwarded
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
        first = self._next_position
        if forwarded <= first:
            return b""
        if forwarded - first <= self._max_positions:
            # Hot path: the numbers of new tokens are formatted for several requests of a step at once.
            covering = self._groups
            if first < self._all_covered_from:
                covering = [group for group in covering if group.covers_any(first, forwarded)]
            records = receiver.record_json(request_id, first, forwarded, take=drop) if covering else []
            if records is not None:
                self._next_position = forwarded
                return self._fill(covering, first, records)
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
            if group.shape.part:
                wanted &= _columns(records, group.shape.part, 1)[:, 0] != 0
            chosen, rows = positions[wanted], records[wanted]
            for readout, column in group.shape.members:
                found[readout.name] = _values(readout, chosen.copy(), _columns(rows, column, readout.width))
        return found

    def _fill(self, covering: list[_Group], first: int, records: list[list[bytes]]) -> bytes:
        """Return the JSON of some positions with the numbers of their records."""
        for numbers in records:
            for column in self._indices:
                numbers[column] = numbers[column][:-2]  # an integer
        if len(records) == 1:
            texts = [group.fill_one(records[0]) for group in covering]
            members = texts[0] if len(texts) == 1 else b",".join(filter(None, texts))
            return b"{%b}" % members.replace(_POSITION, b"%d" % first) if members else b""
        for position, numbers in enumerate(records, first):
            numbers[self._width :] = (b"%d" % position,)  # records are as wide as the widest of their step
        members = b",".join(filter(None, [group.fill(first, records) for group in covering]))
        return b"{%b}" % members if members else b""


_Members = tuple[tuple[CompiledReadout, int], ...]
"""Readouts with their first columns."""


class _Array(NamedTuple):
    """JSON of one array of a readout, with an element for each position."""

    before: bytes
    """Text ahead of the first element."""
    texts: list[bytes]
    """Text of an element around its numbers."""
    columns: list[int]
    """Columns of the numbers in a record with its position behind it."""


class _Template(NamedTuple):
    """JSON of a group's readouts."""

    arrays: list[_Array]
    parts: list[bytes]
    """For one position: text, with `_POSITION` in the place of its number, and places of numbers in turn."""
    choose: Callable[[list[bytes]], Sequence[bytes]]
    """For one position: returns the number of each place from the record."""
    indices: frozenset[int]
    """Columns that hold integers."""


@lru_cache(maxsize=512)
def _template(members: _Members, width: int) -> _Template:
    """Return the template of readouts in records with ``width`` columns."""
    places = np.arange(width + 1, dtype=np.float32)[None]
    arrays, parts, columns, indices, before = list[_Array](), [b""], list[int](), set[int](), b""
    for readout, first in members:
        values = _values(readout, places[:, width].astype(np.int64), places[:, first : first + readout.width].copy())
        before += b"%b:{" % _encode(readout.name)
        for name, (element,) in values.to_json(readout.kind.columns).items():
            sample = _encode(element)
            texts, found = _NUMBER.split(sample), _NUMBER.findall(sample)
            before += b"%b:[" % _encode(name)
            arrays.append(_Array(before, texts, [int(float(each)) for each in found]))
            parts[-1] += before
            if arrays[-1].columns == [width]:
                parts[-1] += _POSITION
            else:
                parts[-1] += texts[0]
                parts += [part for text in texts[1:] for part in (b"", text)]
                columns += arrays[-1].columns
            indices.update(int(each) for each in found if not each.endswith(b".0"))
            before = b"],"
        before = b"]},"
    parts[-1] += _END
    together = slice(columns[0], columns[0] + len(columns))
    choose = itemgetter(together) if columns == [*range(width)][together] else itemgetter(*columns)
    return _Template(arrays, parts, choose, frozenset(each for each in indices if each < width))


class _Shape(NamedTuple):
    """Consecutive readouts of a program that return the same tokens."""

    part: int
    """Column that is 0 for other tokens; 0 for none."""
    members: _Members
    template: _Template


class _Group(NamedTuple):
    """Consecutive readouts of a request, at the positions that they return."""

    intervals: tuple[Interval, ...]
    shape: _Shape

    def covers_any(self, first: int, stop: int) -> bool:
        """Return whether the readouts may return a position from ``first`` up to ``stop``."""
        for start, end in self.intervals:  # noqa: SIM110  # hot path: faster than any()
            if start < stop and first < end:
                return True
        return False

    @property
    def open_from(self) -> int:
        """First position from which on the readouts return every token; `OPEN_END` if there is none."""
        return self.intervals[-1][0] if self.intervals and self.intervals[-1][1] == OPEN_END else OPEN_END

    def fill_one(self, numbers: list[bytes]) -> bytes:
        """Return the members of a JSON object with the numbers of one record, without its position; see `fill`."""
        part, _, template = self.shape
        if part and numbers[part] == b"0.0":
            return b""
        parts = template.parts.copy()
        parts[1::2] = template.choose(numbers)
        return b"".join(parts)

    def fill(self, first: int, records: list[list[bytes]]) -> bytes:
        """Return the members of a JSON object with the numbers of consecutive records; empty if none is returned."""
        part, _, template = self.shape
        records = [
            numbers
            for position, numbers in enumerate(records, first)
            if self.covers_any(position, position + 1) and not (part and numbers[part] == b"0.0")
        ]
        if not records:
            return b""
        parts = list[bytes]()
        for before, texts, columns in template.arrays:
            if len(columns) == 1:
                (column,) = columns
                elements = [numbers[column] for numbers in records]
            else:
                around = [*zip(texts, columns, strict=False)]
                elements = [b"".join([*(text + n[column] for text, column in around), texts[-1]]) for n in records]
            parts += before, b",".join(elements)
        return b"".join((*parts, _END))


def _shapes(program: Program) -> list[tuple[Selector, _Shape]]:
    """Return the selector of each group, and its attributes that do not depend on the prompt."""
    found: list[tuple[Selector, _Shape]] | None = vars(program).get(_SHAPES)
    if found is None:
        layout, found = program.layout, []
        readouts = zip(program.readouts, layout.readouts, strict=True)
        for (_, parts), group in groupby(readouts, lambda each: (each[0].tokens, each[0].parts)):
            members = tuple(group)
            # Selectors can be lists, which have no hash; the text does not depend on them.
            key = tuple((msgspec.structs.replace(readout, tokens="all"), first) for readout, first in members)
            part = layout.parts[parts] if parts else 0
            found.append((members[0][0].selector, _Shape(part, members, _template(key, layout.width))))
        vars(program)[_SHAPES] = found
    return found


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
