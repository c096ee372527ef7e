# SPDX-License-Identifier: Apache-2.0
"""One step's captured rows as they lie in the arena, and which request, positions and sites they are of.

A step of a steady batch differs from the one before only in its positions and its rows: everything else is made once
and shared, so that hardly any Python runs per request and step. Rows leave in one or more forms: as they are, and as
products with the directions of each projection in the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.program import Resolved, RowFormat, TokenProgram

Integers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowIndex:
    """Whose rows a step stores, in batch order: entry by entry the request's id and what each of its tokens stores, as
    codes ``2 * site + before``. A request has an entry for each of its segments that the step meets. ``projection`` is
    the digest of the directions that rows were projected on, empty for rows as they are."""

    ids: tuple[str, ...]
    codes: tuple[tuple[int, ...], ...]
    projection: bytes = b""

    @cached_property
    def widths(self) -> Integers:
        """Rows that each token of an entry stores."""
        return np.fromiter(map(len, self.codes), np.int64, len(self.codes))

    @cached_property
    def index(self) -> dict[str, list[int]]:
        """Each request's entries."""
        index: dict[str, list[int]] = {}
        for entry, request_id in enumerate(self.ids):
            index.setdefault(request_id, []).append(entry)
        return index

    @cached_property
    def wire(self) -> bytes:
        """The entries as they travel; :func:`decode_row_index` is the inverse."""
        distinct = {codes: number for number, codes in enumerate(dict.fromkeys(self.codes))}
        return msgspec.msgpack.encode(
            (self.ids, list(distinct), [distinct[codes] for codes in self.codes], self.projection)
        )

    def chosen(self, entries: Sequence[int]) -> RowIndex:
        """Some of the entries, in their order."""
        return RowIndex(
            tuple(self.ids[entry] for entry in entries), tuple(self.codes[entry] for entry in entries), self.projection
        )


@lru_cache(maxsize=64)
def decode_row_index(wire: bytes) -> RowIndex:
    """The entries of ``RowIndex.wire``: those of a steady batch are one object, step after step."""
    ids, distinct, which, projection = msgspec.msgpack.decode(
        wire, type=tuple[tuple[str, ...], tuple[tuple[int, ...], ...], tuple[int, ...], bytes]
    )
    return RowIndex(ids, tuple(distinct[number] for number in which), projection)


@dataclass(frozen=True)
class StepRows:
    """``start`` and ``count`` ``[entries]`` int64: first position and number of positions of each entry. ``rows``
    ``[rows, bytes of a row]`` uint8: entry by entry, position by position, in the order of the entry's codes. A row is
    a row of the stream in the model's dtype, or its products with a projection's directions in float32."""

    entries: RowIndex
    start: Integers
    count: Integers
    rows: npt.NDArray[np.uint8]

    @cached_property
    def extents(self) -> tuple[list[int], list[int], list[int]]:
        """First position, number of positions, and first row of each entry; the number of rows last."""
        sizes = np.zeros(len(self.count) + 1, dtype=np.int64)
        np.cumsum(self.count * self.entries.widths, out=sizes[1:])
        return self.start.tolist(), self.count.tolist(), sizes.tolist()

    def of(self, entry: int) -> npt.NDArray[np.uint8]:
        """The rows of one entry, as a view."""
        _, _, first = self.extents
        return self.rows[first[entry] : first[entry + 1]]

    def is_followed_by(self, other: StepRows) -> bool:
        """Whether ``other`` is the same for the positions behind, and both have few bytes of each entry, as many of
        each."""
        size, mine = self.rows.nbytes, self.entries
        if other.entries is not mine or not 0 < size <= _SMALL * len(mine.ids) or other.rows.shape != self.rows.shape:
            return False
        sizes = self.count * mine.widths
        return bool(
            (other.start == self.start + self.count).all()
            and (other.count == self.count).all()
            and (sizes == sizes[0]).all()
        )

    def chosen(self, entries: Sequence[int]) -> StepRows:
        """Some of the entries, with a copy of their rows."""
        rows = np.concatenate([self.of(entry) for entry in entries])
        return StepRows(self.entries.chosen(entries), self.start[entries], self.count[entries], rows)


_SMALL = 4096
"""Bytes of an entry in a step up to which it is worth to copy them once more."""


def brought_together(steps: Sequence[StepRows]) -> list[StepRows]:
    """The same rows in fewer steps: such as follow one another, with the same entries and the positions behind, become
    one, in which each entry's rows lie together. Where these are many bytes, or not as many for each entry, steps stay
    as they are; so do those with other steps of the same projection in between, whose order says what came last."""
    found: list[list[StepRows]] = []
    latest: dict[bytes, list[StepRows]] = {}
    for step in steps:
        run = latest.get(step.entries.projection)
        if run is None or not run[-1].is_followed_by(step):
            run = latest[step.entries.projection] = []
            found.append(run)
        run.append(step)
    return [_joined(run) for run in found]


def _joined(run: Sequence[StepRows]) -> StepRows:
    first = run[0]
    if len(run) == 1:
        return first
    entries = len(first.count)
    rows = np.stack([step.rows.reshape(entries, -1, step.rows.shape[-1]) for step in run], axis=1)
    return StepRows(first.entries, first.start, len(run) * first.count, rows.reshape(-1, rows.shape[-1]))


@dataclass(frozen=True)
class RowStream:
    """What leaves of a step in one form. ``spans``: which of the step's spans have an entry; ``rows``: the places of
    its rows in the arena, None where they are all of the step's, in order."""

    entries: RowIndex
    spans: Integers
    rows: Integers | None


@dataclass(frozen=True)
class Plan:
    """:class:`StepRows` ahead of their rows: ``start`` and ``count`` ``[spans]`` as there, and how many rows the spans
    have in the arena. A span is a stretch of one request's positions in one of its segments."""

    channels: tuple[RowStream, ...]
    start: Integers
    count: Integers
    num_rows: int

    def step_of(self, channel: RowStream, rows: npt.NDArray[np.uint8]) -> StepRows:
        return StepRows(channel.entries, self.start[channel.spans], self.count[channel.spans], rows)


@dataclass(frozen=True)
class Reading:
    """The reading requests of a step, in batch order: ids, programs, first token in the batch, first position as the
    host knows it, and number of tokens."""

    ids: tuple[str, ...]
    resolved: tuple[Resolved, ...]
    token: Integers
    first: Integers
    count: Integers

    def most_rows(self) -> int:
        """Rows that they store at most, wherever their positions begin."""
        return sum(n * each.max_captures for n, each in zip(self.count.tolist(), self.resolved, strict=True))

    def projections(self) -> tuple[bytes, ...]:
        """In what forms their rows can leave, wherever their positions begin."""
        forms = (form for each in self.resolved for row in each.token_programs for form in row.row_formats)
        return tuple(dict.fromkeys(form.projection for form in forms))

    def spread(self, first: Sequence[int]) -> Plan:
        """What is stored if their positions begin at ``first``."""
        found = list(self._spans(first))
        ids, rows, start, count = zip(*found, strict=True) if found else ((), (), (), ())
        counts = np.array(count, dtype=np.int64)
        channels = row_streams_of(ids, rows, counts)
        return Plan(channels, np.array(start, dtype=np.int64), counts, int(counts @ _stored(rows)))

    def _spans(self, first: Sequence[int]) -> Iterator[tuple[str, TokenProgram, int, int]]:
        for name, resolved, position, count in zip(self.ids, self.resolved, first, self.count.tolist(), strict=True):
            for start, stop, segment in resolved.spans(position, position + count):
                if segment.program is not None and segment.num_captures:
                    yield name, segment.program, start, stop - start


@dataclass(frozen=True)
class Steady:
    """A batch in which every request that reads has come to its last segment, so that no position changes what it
    stores: ids, and the row of each one's last segment, in batch order."""

    ids: tuple[str, ...]
    rows: tuple[TokenProgram | None, ...]

    @cached_property
    def _stored(self) -> Integers:
        return _stored(self.rows)

    @cached_property
    def _decoding(self) -> tuple[RowStream, ...]:
        return row_streams_of(self.ids, self.rows, np.ones(len(self.ids), dtype=np.int64))

    def plan(self, first: Integers, count: Integers) -> Plan:
        """For a step of ``count`` tokens of each, from the positions ``first`` on."""
        channels = self._decoding
        if any(channel.rows is not None for channel in channels) and (count != 1).any():
            channels = row_streams_of(self.ids, self.rows, count)
        return Plan(channels, first, count, int(count @ self._stored))


def _stored(rows: Sequence[TokenProgram | None]) -> Integers:
    return np.fromiter((0 if row is None else len(row.captures) for row in rows), np.int64, len(rows))


def row_streams_of(ids: Sequence[str], rows: Sequence[TokenProgram | None], count: Integers) -> tuple[RowStream, ...]:
    """The forms in which spans leave, each span being ``count`` tokens of one request under one row."""
    by_form: dict[bytes, list[tuple[int, RowFormat]]] = {}
    for span, row in enumerate(rows):
        for form in () if row is None else row.row_formats:
            by_form.setdefault(form.projection, []).append((span, form))
    return tuple(
        RowStream(
            RowIndex(tuple(ids[span] for span, _ in found), tuple(form.codes for _, form in found), projection),
            np.array([span for span, _ in found], dtype=np.int64),
            None if len(by_form) == 1 else _places(found, _stored(rows), count),
        )
        for projection, found in by_form.items()
    )


def _places(found: Sequence[tuple[int, RowFormat]], stored: Integers, count: Integers) -> Integers | None:
    """Where in the arena the rows of these spans' forms lie; None where they are all that there are."""
    stops = np.cumsum(count * stored)
    base = stops - count * stored
    places = np.concatenate(
        [
            (base[span] + np.arange(count[span])[:, None] * stored[span] + np.array(form.indices)).ravel()
            for span, form in found
        ]
    )
    return None if len(places) == stops[-1] else places
