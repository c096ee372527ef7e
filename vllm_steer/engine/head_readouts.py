# SPDX-License-Identifier: Apache-2.0
"""Readouts that are computed from rows of the arena after the forward pass, and written to the records of a step.

These are the largest outputs of heads, and probes with a hidden layer.

The rows are stored by CAPTURE instructions, like captured rows, but do not leave the device. While the batch does not
change, a step launches the same indices again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from cachetools import LRUCache

from vllm_steer.engine.program_store import ProgramStore
from vllm_steer.engine.step_batch import StepBatch
from vllm_steer.program.token_program import MlpRead
from vllm_steer.taps.heads import Head, largest_outputs
from vllm_steer.taps.mlp import MlpHead

_MAX_MLPS = 32
"""Probes with a hidden layer whose weights are kept on the device beside the vector table."""
_Part = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]


@dataclass(frozen=True)
class _Group:
    """Rows of a step that one head reads with one ``k``, or one probe; int64 tensors on the device."""

    head: Head | MlpHead
    top_k: int
    arena_rows: torch.Tensor
    """``[rows]``."""
    tokens: torch.Tensor
    """``[rows, 1]``, the token of each row."""
    columns: torch.Tensor
    """``[rows, 2 k]``, the columns of its record; ``[rows, 1]`` of a probe."""

    def values(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Return what is written to the columns; None on ranks that have no result."""
        if isinstance(self.head, MlpHead):
            return self.head.values(rows)
        return largest_outputs(self.head, rows, self.top_k)


class HeadReadouts:
    """Head readouts of one engine rank.

    Args:
        store: The rank's programs.
        heads: Heads by the names that programs use.
        enabled: Whether this rank returns records. Other ranks run collective heads, and probes, on which gates may
            depend.
    """

    def __init__(self, store: ProgramStore, heads: Mapping[str, Head], *, enabled: bool) -> None:
        self.heads = heads
        self._store = store
        self._enabled = enabled
        self._key: tuple[int, tuple[str, ...], bytes, bytes] | None = None
        self._steady: tuple[_Group, ...] = ()
        self._planned: tuple[_Group, ...] = ()
        self._mlps: LRUCache[MlpRead, MlpHead] = LRUCache(_MAX_MLPS)

    def plan(self, batch: StepBatch, capturing: npt.NDArray[np.int64]) -> None:
        """Choose the rows that the heads read after the next forward pass.

        Args:
            batch: The step's batch. The host knows its positions: heads are refused with draft tokens.
            capturing: Indices of the requests in the batch that store rows in this step.
        """
        if not self._store.num_with_heads:
            return
        if not (batch.first[capturing] >= self._store.last_segment[batch.request_slot[capturing]]).all():
            self._planned = self._groups(batch, capturing)
            return
        # A request that starts to read, such as one whose prompt has ended, changes neither ids nor counts.
        key = self._store.changes, tuple(batch.ids), batch.count.tobytes(), capturing.tobytes()
        if key != self._key:
            self._steady, self._key = self._groups(batch, capturing), key
        self._planned = self._steady

    def _groups(self, batch: StepBatch, capturing: npt.NDArray[np.int64]) -> tuple[_Group, ...]:
        parts: dict[tuple[str | MlpRead, int], list[_Part]] = {}
        starts = np.cumsum(batch.count) - batch.count
        base = 0
        for index in capturing.tolist():
            first, token = int(batch.first[index]), int(starts[index])
            resolved = self._store.resolved_of(batch.ids[index])
            for start, stop, segment in resolved.spans(first, first + int(batch.count[index])):
                offsets = np.arange(stop - start)
                stored = segment.num_captures
                for head, place in () if segment.program is None else segment.program.heads:
                    columns = np.full(len(offsets), head.column)
                    part = (base + offsets * stored + place, token + offsets, columns)
                    parts.setdefault((head.mlp or head.head, head.top_k), []).append(part)
                base += len(offsets) * stored
                token += len(offsets)
        return tuple(self._group(self._head(name), top_k, found) for (name, top_k), found in parts.items())

    def _head(self, name: str | MlpRead) -> Head | MlpHead:
        if isinstance(name, str):
            return self.heads[name]
        if name not in self._mlps:
            self._mlps[name] = self._store.mlp_head(name)
        return self._mlps[name]

    def _group(self, head: Head | MlpHead, top_k: int, parts: list[_Part]) -> _Group:
        arena_rows, tokens, columns = (np.concatenate(each) for each in zip(*parts, strict=True))
        return _Group(
            head,
            top_k,
            self._upload(arena_rows),
            self._upload(tokens[:, None]),
            self._upload(columns[:, None] + np.arange(2 * top_k or 1)),
        )

    def _upload(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(numbers))
        device = self._store.tables.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

    def run(self) -> None:
        """Compute the planned readouts, after the forward pass and on the same stream."""
        planned, self._planned = self._planned, ()
        tables = self._store.tables
        for group in planned:
            if not (self._enabled or isinstance(group.head, MlpHead) or group.head.collective):
                continue
            new = group.values(tables.arena.index_select(0, group.arena_rows))
            if new is not None:
                old = tables.record[group.tokens, group.columns]
                replayed = tables.replayed[group.tokens] != 0
                tables.record[group.tokens, group.columns] = torch.where(replayed, old, new)
