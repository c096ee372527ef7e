# SPDX-License-Identifier: Apache-2.0
"""Assembly of a request's captured rows from the chunks that its engine steps produced.

Rows are keyed by absolute position. A position may be computed several times (preemption, rejected draft tokens): the
last row counts. Positions beyond the end of the request (drafts) are dropped. The last sampled token is not forwarded,
so a request of ``t`` tokens has rows for the positions ``0 .. t - 2``. If a readout ends the request, its last token
has been forwarded, and the token sampled after it was dropped: callers count that one as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from vllm_steer.capture.results import Site, SiteRows
from vllm_steer.capture.row_payload import RECORDS
from vllm_steer.capture.step_rows import IntArray
from vllm_steer.points import POINT_NAMES
from vllm_steer.request import CaptureSpec, Projection

RowDelta: TypeAlias = Mapping[Site, SiteRows]
_MAX_LISTED = 3  # sites named in an error text
_JOINT_BYTES = 64 << 10
"""Size up to which the rows of several sites are converted at once, because the calls take longer than copies."""


class RowChunk(msgspec.Struct, frozen=True):
    """Rows of consecutive positions of one request."""

    request_id: str
    start: int
    """First position."""
    count: int
    """Number of positions."""
    captures: tuple[int, ...]
    """Rows stored per position, as codes ``2 * site_number + before``."""
    rows: Any
    """Buffer of ``count * len(captures)`` rows, ordered by position. It may be a view of its step's rows."""
    projection: bytes = b""
    """Digest of the directions if the rows are float32 projections; empty for rows in the model's dtype."""


@dataclass(frozen=True)
class _Chosen:
    """The wanted positions that some chunks hold, and the rows to take for them."""

    positions: IntArray
    """``[n]``, ascending and unique."""
    rows: IntArray | None
    """Row number of each position among the chunks' rows, ``[n]``; None for all rows in order."""


class RowAssembler:
    """Collector of the captured rows of one sample of a request while it runs."""

    def __init__(self, num_layers: int, hidden_size: int, dtype: torch.dtype) -> None:
        self._num_layers = num_layers
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._chunks: list[RowChunk] = []
        self.missing_reason: str | None = None
        """The reason that is reported if rows turn out to be missing."""
        self.incomplete_reason: str | None = None
        """The reason why the sample ended early (aborted, failed), which makes its capture partial."""

    def add(self, chunks: Iterable[RowChunk]) -> None:
        """Append chunks in the order in which the engine computed them."""
        self._chunks += chunks

    def since(self, chunk: int, forwarded: int) -> tuple[RowAssembler, int]:
        """Return an assembler of the chunks from number ``chunk`` on, and the number of the chunk to go on with.

        That is the first chunk with a row at position ``forwarded`` or later, whose token is yet to be confirmed.
        """
        part = RowAssembler(self._num_layers, self._hidden_size, self._dtype)
        part._chunks = self._chunks[chunk:]
        for number, each in enumerate(part._chunks, chunk):
            if each.start + each.count > forwarded:
                return part, number
        return part, len(self._chunks)

    def drop(self, num_chunks: int) -> None:
        """Drop the first chunks, which are not read again."""
        del self._chunks[:num_chunks]

    def records(self, forwarded: int) -> tuple[IntArray, npt.NDArray[np.float32]]:
        """Return positions ``[n]`` and records ``[n, width]`` of the tokens before position ``forwarded``."""
        chunks = [chunk for chunk in self._chunks if chunk.projection == RECORDS]
        if not chunks:
            return np.empty(0, dtype=np.int64), np.empty((0, 0), dtype=np.float32)
        width = min(chunk.captures[0] for chunk in chunks)
        values = np.concatenate(
            [np.frombuffer(chunk.rows, np.float32).reshape(chunk.count, -1)[:, :width] for chunk in chunks]
        )
        chosen = _choose(chunks, np.arange(forwarded))
        return chosen.positions, values if chosen.rows is None else values[chosen.rows]

    def assemble(self, spec: CaptureSpec, prompt_len: int, num_tokens: int) -> tuple[dict[Site, SiteRows], str | None]:
        """Assemble the rows that ``spec`` asks for.

        Args:
            spec: The capture of one consumer.
            prompt_len: Number of prompt tokens.
            num_tokens: Number of prompt and generated tokens, including the last sampled one, which has no row.

        Returns:
            The rows by site, and the reason why they are incomplete or inexact, or None. Prompt positions that an
            incomplete sample never computed count as missing.
        """
        forwarded = self._num_forwarded(prompt_len, num_tokens)
        intervals = spec.tokens.intervals(prompt_len, "positions")
        wanted = _concatenate([np.arange(start, min(stop, forwarded)) for start, stop in intervals])
        projection = spec.reduce if isinstance(spec.reduce, Projection) and spec.reduce.in_engine else None
        stored = self._stored(b"" if projection is None else projection.digest)
        # Sites usually share their chunks, and then the choice of rows as well.
        chosen: dict[tuple[int, ...], _Chosen] = {}
        positions: dict[Site, IntArray] = {}
        rows: dict[Site, torch.Tensor] = {}
        missing: list[str] = []
        overflowed: list[str] = []
        joint = sum(memoryview(chunk.rows).nbytes for chunk in self._chunks) <= _JOINT_BYTES
        dtype = self._dtype if spec.dtype is None else getattr(torch, spec.dtype)
        for point, layers in spec.hooks:
            for layer in range(self._num_layers) if layers == "all" else layers:
                columns = stored.get(2 * (layer * len(POINT_NAMES) + POINT_NAMES.index(point)) + spec.before, {})
                chunks = tuple(columns)
                if chunks not in chosen:
                    chosen[chunks] = _choose([self._chunks[number] for number in chunks], wanted)
                found = chosen[chunks].positions
                if len(found) < len(wanted):
                    missing.append(f"{point}[{layer}] has {len(found)} of {len(wanted)} positions")
                site = point, layer
                positions[site] = found.copy()
                rows[site] = _reduce(self._site_rows(columns, chosen[chunks].rows, projection), spec)
                if not joint:
                    rows[site], overflows = _convert(rows[site], dtype)
                    overflowed += [f"{point}[{layer}]"] if overflows else []
        if joint:
            overflowed = _convert_jointly(rows, dtype)
        sites = {site: SiteRows(positions[site], each) for site, each in rows.items()}
        reasons = [self.incomplete_reason]
        if missing:
            reasons.append(self.missing_reason or "; ".join(missing[:_MAX_LISTED]))
        if not len(wanted) and not spec.tokens.is_named:
            named = ", ".join(map(str, spec.tokens.beyond(prompt_len, forwarded)))
            reasons.append(f"positions {named} were not reached; the last position with a row is {forwarded - 1}")
        if overflowed:
            name = str(dtype).removeprefix("torch.")
            reasons.append(f"{', '.join(overflowed[:_MAX_LISTED])} overflows {name} (infinities); use dtype float32")
        return sites, ": ".join(reason for reason in reasons if reason) or None

    def unreached(self, spec: CaptureSpec, prompt_len: int, num_tokens: int) -> tuple[int | list[int | None], ...]:
        """Return the positions that ``spec`` names and that the sample ended before.

        Arguments are those of `assemble`; the form is that of `Selector.beyond`.
        """
        return spec.tokens.beyond(prompt_len, self._num_forwarded(prompt_len, num_tokens))

    def _num_forwarded(self, prompt_len: int, num_tokens: int) -> int:
        """Return the number of positions with a row, or that should have one if the sample is incomplete."""
        forwarded = num_tokens - 1
        return forwarded if self.incomplete_reason is None else max(forwarded, prompt_len)

    def _stored(self, projection: bytes) -> dict[int, dict[int, int]]:
        """Return, for each capture code, the chunks that hold it in this format and its column in each of them."""
        found: dict[int, dict[int, int]] = {}
        for number, chunk in enumerate(self._chunks):
            if chunk.projection == projection:
                for column, code in enumerate(chunk.captures):
                    found.setdefault(code, {})[number] = column
        return found

    def _site_rows(
        self, columns: Mapping[int, int], rows: IntArray | None, projection: Projection | None
    ) -> torch.Tensor:
        """Copy the chosen rows of a site: ``[n, hidden]``, or float32 ``[n, k]`` if projected in the engine.

        The copy uses numpy, because torch's threads would compete with the threads of consumers and engine.
        """
        width, dtype = self._hidden_size, self._dtype
        if projection is not None:
            width, dtype = projection.directions.shape[0], torch.float32
        parts = [np.empty((0, width * dtype.itemsize), dtype=np.uint8)]
        for number, column in columns.items():
            chunk = self._chunks[number]
            parts.append(np.frombuffer(chunk.rows, np.uint8).reshape(chunk.count, len(chunk.captures), -1)[:, column])
        joined = np.concatenate(parts)
        flat = (joined if rows is None else joined[rows]).reshape(-1)
        return torch.from_numpy(flat).view(dtype).view(-1, width)


def _reduce(rows: torch.Tensor, spec: CaptureSpec) -> torch.Tensor:
    """Apply the spec's reduction; sums and products are float32, whatever dtype is returned in the end."""
    if isinstance(spec.reduce, Projection):
        return rows if spec.reduce.in_engine else rows.float() @ torch.from_numpy(spec.reduce.directions.copy()).T
    if spec.reduce == "mean":
        return rows.float().mean(0, keepdim=True) if len(rows) else rows
    return rows[-1:] if spec.reduce == "last" else rows


def _convert(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """Return the rows in a dtype, and whether a finite number became infinite."""
    converted = rows.to(dtype)
    if converted.dtype == rows.dtype or not bool((infinite := converted.isinf()).any()):
        return converted, False
    return converted, bool((infinite & rows.isfinite()).any())


def _convert_jointly(rows: dict[Site, torch.Tensor], dtype: torch.dtype) -> list[str]:
    """Convert the rows of all sites in place; return the names of those in which a finite number became infinite."""
    given = {site: each for site, each in rows.items() if each.dtype != dtype}
    if not given:
        return []
    converted, overflows = _convert(torch.cat([each.reshape(-1) for each in given.values()]), dtype)
    parts = converted.split([each.numel() for each in given.values()])
    for (site, each), part in zip(given.items(), parts, strict=True):
        rows[site] = part.clone().view(each.shape)  # the rows of a site do not keep those of others alive
    if not overflows:
        return []
    return [f"{point}[{layer}]" for (point, layer), each in given.items() if _convert(each, dtype)[1]]


def _choose(chunks: Sequence[RowChunk], wanted: IntArray) -> _Chosen:
    positions = _concatenate([np.arange(each.start, each.start + each.count) for each in chunks])
    rows: IntArray | None = None
    if not (positions[1:] > positions[:-1]).all():
        # np.unique finds first occurrences: reversed, these are the rows that were computed last.
        positions, first = np.unique(positions[::-1], return_index=True)
        rows = sum(each.count for each in chunks) - 1 - first
    if np.array_equal(positions, wanted):
        return _Chosen(positions, rows)
    keep = np.isin(positions, wanted)
    if not keep.all():
        positions, rows = positions[keep], np.flatnonzero(keep) if rows is None else rows[keep]
    return _Chosen(positions, rows)


def _concatenate(arrays: Sequence[npt.NDArray[np.int64]]) -> IntArray:
    return np.concatenate([np.empty(0, dtype=np.int64), *arrays])


class RowDeltaStream:
    """The rows of one running sample for one consumer, in deltas with the rows of the newly confirmed tokens.

    A token is confirmed once the output that follows it is known, because drafts can no longer replace it then.
    Positions that are recomputed after a preemption were already delivered and are skipped, so every position comes
    once, in order.
    """

    def __init__(self, assembler: RowAssembler, spec: CaptureSpec) -> None:
        self._assembler = assembler
        self._spec = spec
        self._next_chunk = 0
        self._next_position = 0

    def next_delta(self, prompt_len: int, num_tokens: int) -> RowDelta:
        """Return the new rows of every site; the arguments are those of ``RowAssembler.assemble``."""
        fresh, self._next_chunk = self._assembler.since(self._next_chunk, num_tokens - 1)
        first, self._next_position = self._next_position, num_tokens - 1
        sites, _ = fresh.assemble(self._spec, prompt_len, num_tokens)
        return {site: _skip_before(first, rows) for site, rows in sites.items()}


def merge_deltas(
    first: Mapping[str, RowDelta] | None, second: Mapping[str, RowDelta] | None
) -> Mapping[str, RowDelta] | None:
    """Concatenate two consecutive deltas, each by consumer name; either may be missing."""
    if not first or not second:
        return first or second
    return {
        name: {site: _join(first[name][site], rows) for site, rows in delta.items()} for name, delta in second.items()
    }


def _skip_before(position: int, rows: SiteRows) -> SiteRows:
    start = int(np.searchsorted(rows.positions, position))
    return SiteRows(rows.positions[start:], rows.rows[start:])


def _join(first: SiteRows, second: SiteRows) -> SiteRows:
    return SiteRows(np.concatenate((first.positions, second.positions)), torch.cat((first.rows, second.rows)))
