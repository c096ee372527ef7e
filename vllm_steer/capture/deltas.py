# SPDX-License-Identifier: Apache-2.0
"""Rows while their request runs: with each piece of a stream, the rows of the tokens that are settled since the last.

A token is settled when the output that follows it is: then no draft stands in its place any more. A position that is
computed again after a preemption has been given already and is left out, so each comes once and in order.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from vllm_steer.capture.assembly import Assembly
from vllm_steer.capture.results import Site, SiteRows
from vllm_steer.spec import CaptureSpec

NewRows = Mapping[Site, SiteRows]


class RowDeltas:
    """The rows of one sample for one consumer, piece by piece."""

    def __init__(self, assembly: Assembly, spec: CaptureSpec) -> None:
        self._assembly = assembly
        self._spec = spec
        self._next_chunk = 0
        self._next_position = 0

    def take(self, prompt_len: int, num_tokens: int) -> NewRows:
        """The rows of what is new, of every site; ``num_tokens`` as for ``Assembly.finish``."""
        fresh, self._next_chunk = self._assembly.since(self._next_chunk)
        first, self._next_position = self._next_position, num_tokens - 1
        sites, _ = fresh.finish(self._spec, prompt_len, num_tokens)
        return {site: _from(rows, first) for site, rows in sites.items()}


def _from(rows: SiteRows, position: int) -> SiteRows:
    start = int(np.searchsorted(rows.positions, position))
    return SiteRows(rows.positions[start:], rows.rows[start:])


def joined(one: Mapping[str, NewRows] | None, other: Mapping[str, NewRows] | None) -> Mapping[str, NewRows] | None:
    """Two pieces of a stream as one, by consumer; either may have none."""
    if not one or not other:
        return one or other
    return {name: {site: _joined(one[name][site], rows) for site, rows in new.items()} for name, new in other.items()}


def _joined(one: SiteRows, other: SiteRows) -> SiteRows:
    return SiteRows(np.concatenate((one.positions, other.positions)), torch.cat((one.rows, other.rows)))
