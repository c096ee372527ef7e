# SPDX-License-Identifier: Apache-2.0
"""From the chunks of a request's steps to its rows, each position exactly once.

Rows are keyed by absolute position. A position that was computed again (preemption, a rejected draft token) comes
again, and the last one counts; a position that was never part of the request (a draft beyond its end) is cut off. The
last sampled token is never forwarded, so a request of ``t`` tokens has positions ``0 .. t - 2``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from vllm_steer.capture.results import Site, SiteRows
from vllm_steer.points import POINT_NAMES
from vllm_steer.spec import CaptureSpec, Projection


class Chunk(msgspec.Struct, frozen=True):
    """Rows of consecutive positions of one request, in memory that is nobody else's.

    ``captures`` names what each position stored, as ``2 * site + before``; ``rows`` is a buffer of ``count *
    len(captures)`` rows, position by position: rows of the hidden size in the model's dtype, or, where ``projection``
    is the digest of directions, their products with them in float32.
    """

    request_id: str
    start: int
    count: int
    captures: tuple[int, ...]
    rows: Any
    projection: bytes = b""


@dataclass(frozen=True)
class _Chosen:
    """Of what some chunks have: the positions that are wanted ``[n]``, ascending and each once, and which rows are
    theirs ``[n]``; None where they are all rows, in order."""

    positions: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64] | None


class Assembly:
    """One sample of one request, while it runs."""

    def __init__(self, num_layers: int, hidden_size: int, dtype: torch.dtype) -> None:
        self._num_layers = num_layers
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._chunks: list[Chunk] = []
        self._reason: str | None = None
        self._cut: str | None = None

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Take what has come since the last time."""
        self._chunks += chunks

    def say(self, reason: str) -> None:
        """Why rows will be missing."""
        self._reason = reason

    def cut(self, reason: str) -> None:
        """Why the sample ended before it was through: whatever has come of it is not all that was asked for."""
        self._cut = reason

    @property
    def num_bytes(self) -> int:
        return sum(memoryview(chunk.rows).nbytes for chunk in self._chunks)

    def since(self, chunk: int) -> tuple[Assembly, int]:
        """What has come since there were ``chunk`` chunks, and how many there are now."""
        part = Assembly(self._num_layers, self._hidden_size, self._dtype)
        part._chunks = self._chunks[chunk:]
        return part, len(self._chunks)

    def finish(self, spec: CaptureSpec, prompt_len: int, num_tokens: int) -> tuple[dict[Site, SiteRows], str | None]:
        """The rows that ``spec`` asks for, and what is missing of them or wrong with them, in words, or None.

        ``num_tokens`` counts prompt and generated tokens, the last sampled one included. Of a sample that was cut the
        prompt's positions are wanted also where it was never computed.
        """
        forwarded = num_tokens - 1 if self._cut is None else max(num_tokens - 1, prompt_len)
        wanted = _wanted(spec, prompt_len, forwarded)
        projected = spec.reduce if isinstance(spec.reduce, Projection) and spec.reduce.in_engine else None
        stored = self._stored(b"" if projected is None else projected.digest)
        # Many sites came in the same chunks, so that the same of their rows are wanted.
        chosen: dict[tuple[int, ...], _Chosen] = {}
        sites: dict[Site, SiteRows] = {}
        missing: list[str] = []
        beyond: list[str] = []
        dtype = self._dtype if spec.dtype is None else getattr(torch, spec.dtype)
        for point, layers in spec.hooks:
            for layer in range(self._num_layers) if layers == "all" else layers:
                where = stored.get(2 * (layer * len(POINT_NAMES) + POINT_NAMES.index(point)) + spec.before, {})
                chunks = tuple(where)
                if chunks not in chosen:
                    chosen[chunks] = _choose([self._chunks[number] for number in chunks], wanted)
                positions = chosen[chunks].positions
                rows = self._rows(where, chosen[chunks].rows, projected)
                if len(positions) < len(wanted):
                    missing.append(f"{point}[{layer}] has {len(positions)} of {len(wanted)} positions")
                reduced = _reduced(rows, spec)
                converted = reduced.to(dtype)
                if converted.dtype != reduced.dtype and bool((converted.isinf() & reduced.isfinite()).any()):
                    beyond.append(f"{point}[{layer}]")
                sites[point, layer] = SiteRows(positions.copy(), converted)
        reasons = [self._cut, (self._reason or "; ".join(missing[:3])) if missing else None]
        if beyond:
            name = str(dtype).removeprefix("torch.")
            reasons.append(f"{', '.join(beyond[:3])} has numbers beyond {name}, given as infinities; ask for float32")
        return sites, ": ".join(reason for reason in reasons if reason) or None

    def _stored(self, projection: bytes) -> dict[int, dict[int, int]]:
        """For each capture the numbers of the chunks that have it in this form, and its place among theirs."""
        found: dict[int, dict[int, int]] = {}
        for number, chunk in enumerate(self._chunks):
            if chunk.projection == projection:
                for place, capture in enumerate(chunk.captures):
                    found.setdefault(capture, {})[number] = place
        return found

    def _rows(
        self, where: Mapping[int, int], rows: npt.NDArray[np.int64] | None, projected: Projection | None
    ) -> torch.Tensor:
        """The chosen rows of a site ``[n, hidden]``, or their products with the directions of a projection ``[n, k]``
        float32; in memory of their own.

        Bytes are joined by numpy: torch's threads would contend with those of consumers and of the engine.
        """
        width, dtype = self._hidden_size, self._dtype
        if projected is not None:
            width, dtype = projected.directions.shape[0], torch.float32
        parts = [np.empty((0, width * dtype.itemsize), dtype=np.uint8)]
        for number, place in where.items():
            chunk = self._chunks[number]
            block = np.frombuffer(chunk.rows, np.uint8).reshape(chunk.count, len(chunk.captures), -1)
            parts.append(block[:, place])
        joined = np.concatenate(parts)
        flat = (joined if rows is None else joined[rows]).reshape(-1)
        return torch.from_numpy(flat).view(dtype).view(-1, width)


def _reduced(rows: torch.Tensor, spec: CaptureSpec) -> torch.Tensor:
    """Reductions are computed in float32, and converted to the spec's dtype, or the model's, when all is done."""
    if isinstance(spec.reduce, Projection):
        return rows if spec.reduce.in_engine else rows.float() @ torch.from_numpy(spec.reduce.directions.copy()).T
    if spec.reduce == "mean":
        return rows.float().mean(0, keepdim=True) if len(rows) else rows
    return rows[-1:] if spec.reduce == "last" else rows


def _choose(chunks: Sequence[Chunk], wanted: npt.NDArray[np.int64]) -> _Chosen:
    positions = np.concatenate(
        [np.empty(0, dtype=np.int64), *(np.arange(each.start, each.start + each.count) for each in chunks)]
    )
    rows: npt.NDArray[np.int64] | None = None
    if not (positions[1:] > positions[:-1]).all():
        # The first of the reversed list is the last that came.
        positions, first = np.unique(positions[::-1], return_index=True)
        rows = sum(each.count for each in chunks) - 1 - first
    keep = np.isin(positions, wanted)
    if not keep.all():
        positions, rows = positions[keep], np.flatnonzero(keep) if rows is None else rows[keep]
    return _Chosen(positions, rows)


def _wanted(spec: CaptureSpec, prompt_len: int, forwarded: int) -> npt.NDArray[np.int64]:
    spans = [(start, min(stop, forwarded)) for start, stop in spec.tokens.intervals(prompt_len, "positions")]
    return np.concatenate(
        [
            np.empty(0, dtype=np.int64),
            *(np.arange(start, stop, dtype=np.int64) for start, stop in spans if start < stop),
        ]
    )
