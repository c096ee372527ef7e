# SPDX-License-Identifier: Apache-2.0
"""From the chunks of a request's steps to its rows, each position exactly once.

Rows are keyed by absolute position. A position that was computed again (preemption, a rejected draft token) comes
again, and the last one counts; a position that was never part of the request (a draft beyond its end) is cut off. The
last sampled token is never forwarded, so a request of ``t`` tokens has positions ``0 .. t - 2``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from vllm_steer.capture.result import Site, SiteRows
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


class Assembly:
    """One sample of one request, while it runs."""

    def __init__(self, num_layers: int, hidden_size: int, dtype: torch.dtype) -> None:
        self._num_layers = num_layers
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._chunks: list[Chunk] = []
        self._reason: str | None = None

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Take what has come since the last time."""
        self._chunks += chunks

    def say(self, reason: str) -> None:
        """Why rows will be missing."""
        self._reason = reason

    @property
    def num_bytes(self) -> int:
        return sum(memoryview(chunk.rows).nbytes for chunk in self._chunks)

    def since(self, chunk: int) -> tuple[Assembly, int]:
        """What has come since there were ``chunk`` chunks, and how many there are now."""
        part = Assembly(self._num_layers, self._hidden_size, self._dtype)
        part._chunks = self._chunks[chunk:]
        return part, len(self._chunks)

    def finish(self, spec: CaptureSpec, prompt_len: int, num_tokens: int) -> tuple[dict[Site, SiteRows], str | None]:
        """The rows that ``spec`` asks for, and what is missing of them, in words, or None.

        ``num_tokens`` counts prompt and generated tokens, the last sampled one included.
        """
        wanted = _wanted(spec, prompt_len, num_tokens - 1)
        projected = spec.reduce if isinstance(spec.reduce, Projection) and spec.reduce.in_engine else None
        sites: dict[Site, SiteRows] = {}
        missing: list[str] = []
        for point, layers in spec.hooks:
            for layer in range(self._num_layers) if layers == "all" else layers:
                code = 2 * (layer * len(POINT_NAMES) + POINT_NAMES.index(point)) + spec.before
                positions, rows = self._site(code, projected)
                keep = np.isin(positions, wanted)
                if not keep.all():
                    positions, rows = positions[keep], rows[torch.from_numpy(keep)]
                if len(positions) < len(wanted):
                    missing.append(f"{point}[{layer}] has {len(positions)} of {len(wanted)} positions")
                sites[point, layer] = SiteRows(positions, self._reduced(rows, spec))
        if not missing:
            return sites, None
        return sites, self._reason or "; ".join(missing[:3])

    def _site(self, capture: int, projected: Projection | None = None) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """All positions of a site, ascending and each once, with their rows ``[n, hidden]``, or their products with the
        directions of a projection ``[n, k]`` float32; in memory of their own.

        Bytes are joined by numpy: torch's threads would contend with those of consumers and of the engine.
        """
        digest, width, dtype = b"", self._hidden_size, self._dtype
        if projected is not None:
            digest, width, dtype = projected.digest, projected.directions.shape[0], torch.float32
        positions = [np.empty(0, dtype=np.int64)]
        rows = [np.empty((0, width * dtype.itemsize), dtype=np.uint8)]
        for chunk in self._chunks:
            if chunk.projection == digest and capture in chunk.captures:
                positions.append(np.arange(chunk.start, chunk.start + chunk.count, dtype=np.int64))
                block = np.frombuffer(chunk.rows, np.uint8).reshape(chunk.count, len(chunk.captures), -1)
                rows.append(block[:, chunk.captures.index(capture)])
        where, joined = np.concatenate(positions), np.concatenate(rows)
        if not (where[1:] > where[:-1]).all():
            # The first of the reversed list is the last that came.
            where, first = np.unique(where[::-1], return_index=True)
            joined = joined[len(joined) - 1 - first]
        return where, torch.from_numpy(joined.reshape(-1)).view(dtype).view(-1, width)

    def _reduced(self, rows: torch.Tensor, spec: CaptureSpec) -> torch.Tensor:
        """Reductions are computed in float32; the result has the spec's dtype, or the model's."""
        dtype = self._dtype if spec.dtype is None else getattr(torch, spec.dtype)
        if isinstance(spec.reduce, Projection):
            if not spec.reduce.in_engine:
                rows = rows.float() @ torch.from_numpy(spec.reduce.directions.copy()).T
        elif spec.reduce == "mean":
            rows = rows.float().mean(0, keepdim=True) if len(rows) else rows
        elif spec.reduce == "last":
            rows = rows[-1:]
        result: torch.Tensor = rows.to(dtype)
        return result


def _wanted(spec: CaptureSpec, prompt_len: int, forwarded: int) -> npt.NDArray[np.int64]:
    spans = [(start, min(stop, forwarded)) for start, stop in spec.tokens.intervals(prompt_len, "positions")]
    return np.concatenate(
        [
            np.empty(0, dtype=np.int64),
            *(np.arange(start, stop, dtype=np.int64) for start, stop in spans if start < stop),
        ]
    )
