# SPDX-License-Identifier: Apache-2.0
"""Captured rows of a running request, for streams: each delta holds the rows of the newly confirmed tokens.

A token is confirmed once the output that follows it is known, because drafts can no longer replace it then. Positions
that are recomputed after a preemption were already delivered and are skipped, so every position comes once, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch

from vllm_steer.capture.results import Site, SiteRows
from vllm_steer.capture.row_assembler import RowAssembler
from vllm_steer.request import CaptureSpec

RowDelta: TypeAlias = Mapping[Site, SiteRows]


class RowDeltaStream:
    """The row deltas of one sample for one consumer."""

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
