# SPDX-License-Identifier: Apache-2.0
"""Captured rows of one engine step, as they travel from the worker to the front end.

:class:`StepRows` holds the rows of all requests of a step in one array; its :class:`RowIndex` maps them to requests and
sites. Consecutive steps of an unchanged batch share one index, so the Python work per request and step stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]

_encode = msgspec.json.Encoder().encode
MAX_NUMBERS = 1024
"""Numbers of records that are formatted as JSON at once, for several requests."""
_MAX_MERGED_ENTRY_BYTES = 4096
"""Bytes per entry and step up to which merging steps is worth another copy of the rows."""


@dataclass(frozen=True)
class RowIndex:
    """Requests and sites of a step's rows, in batch order.

    An entry covers the tokens that one request has in the step within one segment of its program, so a request has
    several entries if the step crosses a segment boundary.
    """

    request_ids: tuple[str, ...]
    """Request of each entry."""
    codes: tuple[tuple[int, ...], ...]
    """Rows stored per token of each entry, as codes ``2 * site_number + before``."""
    projection: bytes = b""
    """Digest of the directions that the rows were projected on; empty for rows of the stream."""

    @cached_property
    def widths(self) -> IntArray:
        """Rows per token of each entry, ``[entries]``."""
        return np.fromiter(map(len, self.codes), np.int64, len(self.codes))

    @cached_property
    def entries_by_request(self) -> dict[str, list[int]]:
        """Entry numbers by request id."""
        entries: dict[str, list[int]] = {}
        for entry, request_id in enumerate(self.request_ids):
            entries.setdefault(request_id, []).append(entry)
        return entries

    @cached_property
    def only_entry(self) -> dict[str, int]:
        """Number of each request's entry; -1 for a request with several."""
        found = dict(zip(self.request_ids, range(len(self.request_ids)), strict=True))
        if len(found) < len(self.request_ids):
            found.update({name: -1 for name, entries in self.entries_by_request.items() if len(entries) > 1})
        return found

    def entries_of(self, request_id: str) -> Sequence[int]:
        """Return the numbers of a request's entries."""
        entry = self.only_entry.get(request_id)
        if entry is None:
            return ()
        return (entry,) if entry >= 0 else self.entries_by_request[request_id]

    @cached_property
    def encoded(self) -> bytes:
        """The index as MessagePack; :func:`decode_row_index` is the inverse."""
        distinct = {codes: number for number, codes in enumerate(dict.fromkeys(self.codes))}
        return msgspec.msgpack.encode(
            (self.request_ids, list(distinct), [distinct[codes] for codes in self.codes], self.projection)
        )

    def select(self, entries: Sequence[int]) -> RowIndex:
        """Return an index of the given entries only."""
        return RowIndex(
            tuple(self.request_ids[entry] for entry in entries),
            tuple(self.codes[entry] for entry in entries),
            self.projection,
        )


@lru_cache(maxsize=64)
def decode_row_index(data: bytes) -> RowIndex:
    """Decode ``RowIndex.encoded``. Cached, so the steps of an unchanged batch share one object."""
    request_ids, distinct, numbers, projection = msgspec.msgpack.decode(
        data, type=tuple[tuple[str, ...], tuple[tuple[int, ...], ...], tuple[int, ...], bytes]
    )
    return RowIndex(request_ids, tuple(distinct[number] for number in numbers), projection)


@dataclass(frozen=True)
class StepRows:
    """Rows of one step in one format, ordered by entry, then position, then the entry's codes."""

    index: RowIndex
    start: IntArray
    """First position of each entry, ``[entries]``."""
    count: IntArray
    """Number of positions of each entry, ``[entries]``."""
    rows: npt.NDArray[np.uint8]
    """``[rows, bytes per row]``: rows of the stream in the model's dtype, or float32 projections."""

    @cached_property
    def extents(self) -> tuple[list[int], list[int], list[int]]:
        """First position, number of positions and first row of each entry; the row offsets end with the total."""
        offsets = np.zeros(len(self.count) + 1, dtype=np.int64)
        np.cumsum(self.count * self.index.widths, out=offsets[1:])
        return self.start.tolist(), self.count.tolist(), offsets.tolist()

    def rows_of(self, entry: int) -> npt.NDArray[np.uint8]:
        """Return a view of one entry's rows."""
        _, _, offsets = self.extents
        return self.rows[offsets[entry] : offsets[entry + 1]]

    def record_json(self, row: int) -> list[bytes]:
        """Return each number of a record as JSON, in a new list.

        The records of several requests are formatted together, whichever is read first.
        """
        width, rows = self._block
        block, place = divmod(row, rows)
        found = self._formatted.get(block)
        if found is None:
            numbers = self.rows[block * rows : (block + 1) * rows].view(np.float32).reshape(-1)
            found = self._formatted[block] = _encode(numbers.tolist())[1:-1].split(b",")
        return found[place * width : (place + 1) * width]

    @cached_property
    def _block(self) -> tuple[int, int]:
        """Width of a record, and the number of records that are formatted at once."""
        width = self.rows.shape[1] // 4
        return width, max(1, MAX_NUMBERS // width)

    @cached_property
    def _formatted(self) -> dict[int, list[bytes]]:
        """Numbers of the records as JSON, by block of rows."""
        return {}

    def can_merge(self, following: StepRows) -> bool:
        """Return whether ``following`` continues every entry at its next position.

        Only steps with equally many, and few, bytes per entry are merged.
        """
        size, index = self.rows.nbytes, self.index
        limit = _MAX_MERGED_ENTRY_BYTES * len(index.request_ids)
        if following.index is not index or not 0 < size <= limit or following.rows.shape != self.rows.shape:
            return False
        sizes = self.count * index.widths
        return bool(
            (following.start == self.start + self.count).all()
            and (following.count == self.count).all()
            and (sizes == sizes[0]).all()
        )

    def select(self, entries: Sequence[int]) -> StepRows:
        """Return the given entries with a copy of their rows."""
        rows = np.concatenate([self.rows_of(entry) for entry in entries])
        return StepRows(self.index.select(entries), self.start[entries], self.count[entries], rows)


def merge_steps(steps: Sequence[StepRows]) -> list[StepRows]:
    """Merge runs of mergeable steps (:meth:`StepRows.can_merge`), so that each entry's rows become contiguous.

    Steps of the same projection keep their order, since the last row of a position counts.
    """
    runs: list[list[StepRows]] = []
    latest: dict[bytes, list[StepRows]] = {}
    for step in steps:
        run = latest.get(step.index.projection)
        if run is None or not run[-1].can_merge(step):
            run = latest[step.index.projection] = []
            runs.append(run)
        run.append(step)
    return [_merge_run(run) for run in runs]


def _merge_run(run: Sequence[StepRows]) -> StepRows:
    first = run[0]
    if len(run) == 1:
        return first
    num_entries = len(first.count)
    rows = np.stack([step.rows.reshape(num_entries, -1, step.rows.shape[-1]) for step in run], axis=1)
    return StepRows(first.index, first.start, len(run) * first.count, rows.reshape(-1, rows.shape[-1]))
