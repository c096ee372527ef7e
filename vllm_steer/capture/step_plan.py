# SPDX-License-Identifier: Apache-2.0
"""The worker's plan of a step's captures: where each request's rows lie in the arena, and in which formats they leave.

Rows leave as they are, as projections on directions, or both. Each format of a step is one :class:`RowStream`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from vllm_steer.capture.step_rows import IntArray, RowIndex, StepRows
from vllm_steer.program import Resolved, RowFormat, TokenProgram


@dataclass(frozen=True)
class RowStream:
    """The rows of a step that leave in one format."""

    index: RowIndex
    spans: IntArray
    """Span of the step that each entry covers, ``[entries]``."""
    arena_rows: IntArray | None
    """Arena rows of the stream, in order; None for all rows of the step."""


@dataclass(frozen=True)
class CapturePlan:
    """The rows that one step captures.

    A span is a run of consecutive positions of one request within one segment of its program.
    """

    streams: tuple[RowStream, ...]
    start: IntArray
    """First position of each span, ``[spans]``."""
    count: IntArray
    """Number of positions of each span, ``[spans]``."""
    num_rows: int
    """Number of arena rows that the step stores."""

    def make_step_rows(self, stream: RowStream, rows: npt.NDArray[np.uint8]) -> StepRows:
        """Combine a stream with its rows ``[rows, bytes per row]``."""
        return StepRows(stream.index, self.start[stream.spans], self.count[stream.spans], rows)


@dataclass(frozen=True)
class UncertainPlan:
    """A plan of a step whose positions only the device knows, because of draft tokens."""

    token: IntArray
    """Index of each request's first token in the batch, ``[requests]``."""
    plan_at: Callable[[Sequence[int]], CapturePlan]
    """Returns the plan for the given first positions, one per request."""


@dataclass(frozen=True)
class CaptureBatch:
    """The capturing requests of a step, in batch order."""

    request_ids: tuple[str, ...]
    resolved: tuple[Resolved, ...]
    count: IntArray
    """Number of tokens of each request, ``[requests]``."""

    def max_captured_rows(self) -> int:
        """Return an upper bound of the stored rows that holds for any first positions."""
        return sum(n * each.max_captures for n, each in zip(self.count.tolist(), self.resolved, strict=True))

    def projections(self) -> tuple[bytes, ...]:
        """Return every format in which rows can leave, for any first positions."""
        formats = (
            each for resolved in self.resolved for program in resolved.token_programs for each in program.row_formats
        )
        return tuple(dict.fromkeys(each.projection for each in formats))

    def plan_at(self, first: Sequence[int]) -> CapturePlan:
        """Return the plan for the given first positions, one per request."""
        spans = list(self._spans(first))
        request_ids, programs, start, count = zip(*spans, strict=True) if spans else ((), (), (), ())
        counts = np.array(count, dtype=np.int64)
        streams = make_row_streams(request_ids, programs, counts)
        return CapturePlan(streams, np.array(start, dtype=np.int64), counts, int(counts @ _rows_per_token(programs)))

    def _spans(self, first: Sequence[int]) -> Iterator[tuple[str, TokenProgram, int, int]]:
        requests = zip(self.request_ids, self.resolved, first, self.count.tolist(), strict=True)
        for request_id, resolved, position, count in requests:
            last = resolved.segments[-1]
            if position >= last.start:  # most requests decode
                if last.program is not None and last.program.captures:
                    yield request_id, last.program, position, count
                continue
            for start, stop, segment in resolved.spans(position, position + count):
                if segment.program is not None and segment.num_captures:
                    yield request_id, segment.program, start, stop - start


@dataclass(frozen=True)
class SteadyCaptureBatch:
    """A batch whose capturing requests have all reached their last segment, so that one plan serves every position."""

    request_ids: tuple[str, ...]
    programs: tuple[TokenProgram | None, ...]
    """Program of each request's last segment, in batch order."""

    @cached_property
    def _rows_per_token(self) -> IntArray:
        return _rows_per_token(self.programs)

    @cached_property
    def _decode_streams(self) -> tuple[RowStream, ...]:
        return make_row_streams(self.request_ids, self.programs, np.ones(len(self.request_ids), dtype=np.int64))

    def plan(self, first: IntArray, count: IntArray) -> CapturePlan:
        """Return the plan for ``count`` tokens of each request from the positions ``first`` on, both ``[requests]``."""
        streams = self._decode_streams
        if any(stream.arena_rows is not None for stream in streams) and (count != 1).any():
            streams = make_row_streams(self.request_ids, self.programs, count)
        return CapturePlan(streams, first, count, int(count @ self._rows_per_token))


def make_row_streams(
    request_ids: Sequence[str], programs: Sequence[TokenProgram | None], count: IntArray
) -> tuple[RowStream, ...]:
    """Group spans by row format.

    Args:
        request_ids: Request of each span.
        programs: Program of each span's tokens; None stores nothing.
        count: Number of tokens of each span, ``[spans]``.
    """
    if programs and programs[0] is not None and _are_one(programs):
        return tuple(_equal_spans(request_ids, programs[0], each, int(count.sum())) for each in programs[0].row_formats)
    per_token = _rows_per_token(programs)
    by_format: dict[bytes, list[tuple[int, RowFormat]]] = {}
    for span, program in enumerate(programs):
        for row_format in () if program is None else program.row_formats:
            by_format.setdefault(row_format.projection, []).append((span, row_format))
    # Heads of readouts use rows that do not leave.
    several = any(program is not None and program.heads for program in programs)
    return tuple(
        RowStream(
            RowIndex(tuple(request_ids[span] for span, _ in found), tuple(each.codes for _, each in found), projection),
            np.array([span for span, _ in found], dtype=np.int64),
            _arena_rows(found, per_token, count) if several or len(by_format) > 1 else None,
        )
        for projection, found in by_format.items()
    )


def _equal_spans(request_ids: Sequence[str], program: TokenProgram, row_format: RowFormat, tokens: int) -> RowStream:
    """Return the stream of one format if all spans, of ``tokens`` tokens together, have the same program."""
    stored, indices = len(program.captures), row_format.indices
    rows = None if len(indices) == stored else (np.arange(tokens)[:, None] * stored + np.array(indices)).ravel()
    index = RowIndex(tuple(request_ids), (row_format.codes,) * len(request_ids), row_format.projection)
    return RowStream(index, np.arange(len(request_ids)), rows)


def _rows_per_token(programs: Sequence[TokenProgram | None]) -> IntArray:
    if programs and _are_one(programs):
        return np.full(len(programs), 0 if programs[0] is None else len(programs[0].captures))
    return np.fromiter(
        [0 if program is None else len(program.captures) for program in programs], np.int64, len(programs)
    )


def _are_one(programs: Sequence[TokenProgram | None]) -> bool:
    """Return whether all programs are one object, as those of requests with equal programs are."""
    return len(set(map(id, programs))) == 1


def _arena_rows(found: Sequence[tuple[int, RowFormat]], per_token: IntArray, count: IntArray) -> IntArray | None:
    """Return the arena rows of one format's spans, or None if these are all rows of the step."""
    stops = np.cumsum(count * per_token)
    base = stops - count * per_token
    arena_rows = np.concatenate(
        [
            (base[span] + np.arange(count[span])[:, None] * per_token[span] + np.array(row_format.indices)).ravel()
            for span, row_format in found
        ]
    )
    return None if len(arena_rows) == stops[-1] else arena_rows
