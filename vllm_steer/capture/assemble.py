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
from vllm_steer.engine.collect import Chunk
from vllm_steer.points import POINT_NAMES
from vllm_steer.spec import CaptureSpec, Projection


class Assembly:
    """One sample of one request, while it runs."""

    def __init__(self, num_layers: int, hidden_size: int, dtype: torch.dtype) -> None:
        self._num_layers = num_layers
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._chunks: list[Chunk] = []
        self._reason: str | None = None

    def add(self, chunks: Iterable[Any]) -> None:
        """Take the chunks of one output, as :class:`Chunk` or in the wire's builtins, or the reason why none come."""
        for chunk in chunks:
            if isinstance(chunk, str):
                self._reason = chunk
            else:
                self._chunks.append(chunk if isinstance(chunk, Chunk) else msgspec.convert(chunk, Chunk))

    @property
    def num_bytes(self) -> int:
        return sum(len(chunk.rows) for chunk in self._chunks)

    def finish(self, spec: CaptureSpec, prompt_len: int, num_tokens: int) -> tuple[dict[Site, SiteRows], str | None]:
        """The rows that ``spec`` asks for, and what is missing of them, in words, or None.

        ``num_tokens`` counts prompt and generated tokens, the last sampled one included.
        """
        wanted = _wanted(spec, prompt_len, num_tokens - 1)
        sites: dict[Site, SiteRows] = {}
        missing: list[str] = []
        for point, layers in spec.hooks:
            for layer in range(self._num_layers) if layers == "all" else layers:
                positions, rows = self._site(2 * (layer * len(POINT_NAMES) + POINT_NAMES.index(point)) + spec.before)
                keep = np.isin(positions, wanted)
                positions, rows = positions[keep], rows[torch.from_numpy(keep)]
                if len(positions) < len(wanted):
                    missing.append(f"{point}[{layer}] has {len(positions)} of {len(wanted)} positions")
                sites[point, layer] = SiteRows(positions, _reduced(rows, spec))
        if not missing:
            return sites, None
        return sites, self._reason or "; ".join(missing[:3])

    def _site(self, capture: int) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """All positions of a site, ascending and each once, with their rows ``[n, hidden]``."""
        positions = [np.empty(0, dtype=np.int64)]
        rows = [torch.empty(0, self._hidden_size, dtype=self._dtype)]
        for chunk in self._chunks:
            if capture in chunk.captures:
                positions.append(np.arange(chunk.start, chunk.start + chunk.count, dtype=np.int64))
                # A copy is made below, so nothing writes through to the bytes.
                block = torch.frombuffer(bytearray(chunk.rows), dtype=self._dtype)
                block = block.view(chunk.count, len(chunk.captures), self._hidden_size)
                rows.append(block[:, chunk.captures.index(capture)])
        joined = np.concatenate(positions)
        # The first of the reversed list is the last that came.
        unique, first = np.unique(joined[::-1], return_index=True)
        return unique, torch.cat(rows)[torch.from_numpy(len(joined) - 1 - first)]


def _wanted(spec: CaptureSpec, prompt_len: int, forwarded: int) -> npt.NDArray[np.int64]:
    spans = [(start, min(stop, forwarded)) for start, stop in spec.tokens.intervals(prompt_len, "positions")]
    return np.concatenate(
        [
            np.empty(0, dtype=np.int64),
            *(np.arange(start, stop, dtype=np.int64) for start, stop in spans if start < stop),
        ]
    )


def _reduced(rows: torch.Tensor, spec: CaptureSpec) -> torch.Tensor:
    """Reductions are computed in float32; the result has the spec's dtype, or the model's."""
    dtype = rows.dtype if spec.dtype is None else getattr(torch, spec.dtype)
    if isinstance(spec.reduce, Projection):
        rows = rows.float() @ torch.from_numpy(spec.reduce.directions.copy()).T
    elif spec.reduce == "mean":
        rows = rows.float().mean(0, keepdim=True) if len(rows) else rows
    elif spec.reduce == "last":
        rows = rows[-1:]
    result: torch.Tensor = rows.to(dtype)
    return result
