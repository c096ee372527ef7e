# SPDX-License-Identifier: Apache-2.0
"""Readouts and trace of one choice of a response, as JSON types.

The values are read when a part of the response is sent, and not when the engine's output is processed, so an event that
covers several tokens costs as much as an event of one token.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

import msgspec

from vllm_steer.capture.record_reader import Record
from vllm_steer.frontend.sample_state import sample_of
from vllm_steer.metrics.requests import count_gates
from vllm_steer.program import Program
from vllm_steer.program.readouts import ReadoutKind
from vllm_steer.request.selector import Interval

READOUTS_KEY, TRACE_KEY = "readouts", "steering_trace"
"""Names of the response fields."""
_encoder = msgspec.json.Encoder()


class _Tokens(NamedTuple):
    """The tokens that readouts return."""

    intervals: tuple[Interval, ...]
    part: int
    """Column that is 0 for other tokens; 0 for none."""


class _Readout(NamedTuple):
    """A readout and its place in a record."""

    name: str
    column: int
    width: int
    kind: ReadoutKind
    top_k: int


class ReadoutFeed:
    """Readouts of one sample that the response has not carried yet. For the event loop only."""

    def __init__(self, state: Any, model_name: str = "", no_trace: str | None = None) -> None:
        """Take over the records of a sample; its outputs no longer carry readouts.

        Args:
            state: vLLM's ``RequestState`` of a sample whose program is dynamic.
            model_name: The model's name in metrics.
            no_trace: Error in place of the trace, if the choice has none.
        """
        self._no_trace = no_trace
        self._model_name = model_name
        sample = sample_of(state)
        if sample is None or sample.readouts is None:
            raise ValueError("the request has no records")
        self._state, self._sample, program = state, sample, sample.readouts.program
        self._reader = sample.read_records(state)
        self._empty = {
            readout.name: dict.fromkeys(("positions", *readout.kind.fields), ()) for readout in program.readouts
        }
        self._by_tokens = _readouts_by_tokens(program, state.prompt_len)
        self._gates = [
            (column, program.edits[number].selector.intervals(state.prompt_len))
            for number, column in program.layout.gates.items()
        ]
        self._live = dict(program.layout.live)
        self._template = None if self._gates or self._live else _template(self._by_tokens)
        self._trace_taken = self._has_output = False
        self._trace_positions: list[int] = []
        self._trace_records: list[Record] = []

    def take(self) -> dict[str, Any]:
        """Return ``{name: {"positions", "values"}}`` of the new tokens, without readouts that have no new value."""
        return self._values(*self._reader.take(self._sample.num_forwarded(self._state)))

    def _awaits_prompt(self) -> bool:
        """Return whether the engine may not have sent all records of the prompt, which is certain only with an output.

        An event can come before: a stream of chat completions begins all choices when the first one has an output.
        """
        self._has_output = self._sample.has_stopped or self._state.detokenizer.num_output_tokens() > 0
        return not self._has_output

    def _values(self, positions: list[int], records: list[Record]) -> dict[str, Any]:
        if not positions:
            return {}
        if self._gates or self._live:
            generated = bisect_left(positions, self._state.prompt_len)
            self._trace_positions += positions[generated:]
            self._trace_records += records[generated:]
        found: dict[str, Any] = {}
        for tokens, readouts in self._by_tokens:
            chosen, rows = _choose(positions, records, tokens)
            if not chosen:
                continue
            columns = list(zip(*rows, strict=False))
            for name, column, width, kind, top_k in readouts:
                if top_k:
                    found[name] = {"positions": chosen, **_split(rows, column, width, top_k, kind)}
                    continue
                values = columns[column] if kind.is_scalar else [row[column : column + width] for row in rows]
                found[name] = {"positions": chosen, "values": values}
        return found

    def take_json(self, *, last: bool = False) -> bytes:
        """Return the result of :meth:`take` as JSON, empty without a new value.

        Args:
            last: Whether the choice has ended.
        """
        if not (self._has_output or last) and self._awaits_prompt():
            return b""
        forwarded, template = self._sample.num_forwarded(self._state), self._template
        if template is not None and template.covers(forwarded - 1):
            numbers = self._reader.take_json(forwarded)
            if numbers is not None:
                return template.fill(forwarded - 1, numbers)
        values = self._values(*self._reader.take(forwarded))
        return _encoder.encode(values) if values else b""

    def take_fields(self, *, last: bool) -> tuple[bytes, bytes]:
        """Return the JSON of the new values, and of the trace if the choice has ended; each may be empty."""
        values = self.take_json(last=last)
        trace = self.take_trace() if last else None  # of the values taken so far
        return values, b"" if trace is None else _encoder.encode(trace)

    def take_members(self, *, last: bool) -> list[bytes]:
        """Return the fields of `take_fields` as members of a JSON object."""
        fields = zip((READOUTS_KEY, TRACE_KEY), self.take_fields(last=last), strict=True)
        return [b'"%b":%b' % (name.encode(), value) for name, value in fields if value]

    def take_all(self) -> dict[str, Any]:
        """Return the values of `take` for every readout of the request, in its order."""
        found = self.take()
        return {name: found.get(name) or dict(empty) for name, empty in self._empty.items()}

    def take_trace(self) -> dict[str, Any] | None:
        """Return the trace of the values taken so far, or the error, once; None without gated and live edits."""
        if self._trace_taken or not (self._gates or self._live):
            return None
        self._trace_taken = True
        if self._no_trace is not None:
            return {"error": self._no_trace}
        problem = self._sample.controller_error
        # As in SteeringTrace: 0 at tokens that the edit does not cover.
        gates = [
            [
                record[column] if any(start <= position < stop for start, stop in intervals) else 0.0
                for column, intervals in self._gates
            ]
            for position, record in zip(self._trace_positions, self._trace_records, strict=True)
        ]
        inside = [
            p for _, intervals in self._gates for p in self._trace_positions if any(a <= p < b for a, b in intervals)
        ]
        count_gates(self._model_name, len(inside), sum(factor != 0.0 for factors in gates for factor in factors))
        return {
            "positions": self._trace_positions,
            "gates": gates,
            "live": {name: [record[column] for record in self._trace_records] for name, column in self._live.items()},
            **({} if problem is None else {"controller_error": problem}),
        }


def _readouts_by_tokens(program: Program, prompt_len: int) -> list[tuple[_Tokens, list[_Readout]]]:
    """Return the readouts grouped by the positions that they return."""
    groups: dict[_Tokens, list[_Readout]] = {}
    for readout, column in zip(program.readouts, program.layout.readouts, strict=True):
        tokens = _Tokens(readout.selector.intervals(prompt_len), program.layout.parts.get(readout.parts, 0))
        groups.setdefault(tokens, []).append(_Readout(readout.name, column, readout.width, readout.kind, readout.top_k))
    return list(groups.items())


class _Template:
    """The JSON of one position of probes that return the same positions, with places for its numbers."""

    def __init__(self, readouts: list[_Readout], intervals: tuple[Interval, ...]) -> None:
        self._intervals = intervals
        self._start, self._stop = readouts[0].column, readouts[-1].column + 1
        names = [_encoder.encode(each.name) for each in readouts]
        # For each probe: text, position, text, value.
        self._parts: list[bytes] = []
        for name in names:
            self._parts += (b"]}," if self._parts else b"{") + name + b':{"positions":[', b"", b'],"values":[', b""
        self._parts.append(b"]}}")
        self._count = len(names)

    def covers(self, position: int) -> bool:
        """Return whether the probes return a position."""
        for start, stop in self._intervals:  # noqa: SIM110  # hot path: faster than any()
            if start <= position < stop:
                return True
        return False

    def fill(self, position: int, numbers: list[bytes]) -> bytes:
        """Return the JSON with the numbers of a record."""
        parts = self._parts
        parts[1::4] = [b"%d" % position] * self._count
        parts[3::4] = numbers[self._start : self._stop]
        return b"".join(parts)


def _template(groups: list[tuple[_Tokens, list[_Readout]]]) -> _Template | None:
    """Return the template of a request's readouts, or None if they are not probes that return the same positions."""
    if len(groups) != 1 or groups[0][0].part:
        return None
    tokens, readouts = groups[0]
    columns = [each.column for each in readouts]
    scalar = all(each.kind.is_scalar for each in readouts)
    if not scalar or columns != list(range(columns[0], columns[0] + len(columns))):
        return None
    return _Template(readouts, tokens.intervals)


def _split(rows: list[Record], column: int, width: int, top_k: int, kind: ReadoutKind) -> dict[str, Any]:
    """Return indices and values of a head, by position, and by layer for a lens."""
    starts = range(column, column + width, 2 * top_k)
    indices: list[Any] = [[[int(number) for number in row[start : start + top_k]] for start in starts] for row in rows]
    values: list[Any] = [[row[start + top_k : start + 2 * top_k] for start in starts] for row in rows]
    if not kind.has_layers:
        indices, values = [each for (each,) in indices], [each for (each,) in values]
    return dict(zip(kind.fields, (indices, values), strict=True))


def _choose(positions: list[int], records: list[Record], tokens: _Tokens) -> tuple[list[int], list[Record]]:
    """Return the positions that readouts return, and their records."""
    intervals, part = tokens
    if part:
        kept = [place for place, record in enumerate(records) if record[part]]
        positions, records = [positions[place] for place in kept], [records[place] for place in kept]
        if not kept:
            return [], []
    first, last = positions[0], positions[-1]
    if any(start <= first and last < stop for start, stop in intervals):
        return positions, records
    spans = [(bisect_left(positions, start), bisect_left(positions, stop)) for start, stop in intervals]
    return (
        [position for low, high in spans for position in positions[low:high]],
        [record for low, high in spans for record in records[low:high]],
    )
