# SPDX-License-Identifier: Apache-2.0
"""Capture in a worker: which rows a step stores in the arena, and the start of their copy to the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_steer.capture.step_plan import CaptureBatch, CapturePlan, SteadyCaptureBatch
from vllm_steer.engine.device_to_host import DeviceToHostCopier, PendingRows, Transfer
from vllm_steer.engine.program_store import ProgramStore
from vllm_steer.engine.step_batch import StepBatch


@dataclass(frozen=True)
class _StoredRows:
    """The first ``num_rows`` rows of the arena, which the running step stores."""

    plan: CapturePlan | CaptureBatch
    num_rows: int
    position: torch.Tensor | None


class RowCapture:
    """Captured rows of one engine rank.

    Args:
        store: The rank's programs.
        copier: Copies rows to the host.
        enabled: Whether this rank returns rows. The tensor-parallel ranks capture the same rows; one returns them.
        speculative: Whether draft tokens make the host's positions uncertain.
    """

    def __init__(self, store: ProgramStore, copier: DeviceToHostCopier, *, enabled: bool, speculative: bool) -> None:
        self._store = store
        self._arena = store.tables.arena
        self._copier = copier
        self._enabled = enabled
        self._speculative = speculative
        self._stored: _StoredRows | None = None
        self._pending: PendingRows | None = None
        self._steady: tuple[int, SteadyCaptureBatch] = (-1, SteadyCaptureBatch((), ()))

    @property
    def num_pinned_bytes(self) -> int:
        """Total size in bytes of the pooled pinned buffers."""
        return self._copier.num_bytes

    def plan(self, batch: StepBatch, capturing: npt.NDArray[np.int64]) -> None:
        """CapturePlan which rows the next forward pass stores.

        Args:
            batch: The step's batch.
            capturing: Indices of the requests in the batch that capture in this step.
        """
        if not self._enabled:
            return
        plan, num_rows, position = self._plan(batch, capturing)
        num_rows = min(num_rows, self._arena.shape[0])
        self._stored = _StoredRows(plan, num_rows, position) if num_rows else None

    def _plan(
        self, batch: StepBatch, capturing: npt.NDArray[np.int64]
    ) -> tuple[CapturePlan | CaptureBatch, int, torch.Tensor | None]:
        store = self._store
        first, count = batch.first[capturing], batch.count[capturing]
        everyone = len(capturing) == len(batch.ids)
        ids = tuple(batch.ids) if everyone else tuple(batch.ids[i] for i in capturing.tolist())
        if not self._speculative and (first >= store.last_segment[batch.request_slot[capturing]]).all():
            plan = self._steady_batch(ids).plan(first, count)
            return plan, plan.num_rows, None
        token = (np.cumsum(batch.count) - batch.count)[capturing]
        captures = CaptureBatch(ids, tuple(store.resolved_of(name) for name in ids), token, first, count)
        if self._speculative:
            return captures, captures.max_captured_rows(), batch.layout().position
        plan = captures.plan_at(first.tolist())
        return plan, plan.num_rows, None

    def _steady_batch(self, ids: tuple[str, ...]) -> SteadyCaptureBatch:
        """Return the plan of a batch in which every request has reached its last segment.

        It stays valid until a request is added or removed, or the batch order changes.
        """
        changes, steady = self._steady
        if changes != self._store.changes or steady.request_ids != ids:
            steady = SteadyCaptureBatch(ids, tuple(self._store.resolved_of(name).segments[-1].program for name in ids))
            self._steady = (self._store.changes, steady)
        return steady

    def start_copy(self) -> None:
        """Start copying the rows that the forward pass has stored, on the same stream."""
        stored, self._stored = self._stored, None
        if stored is not None:
            rows = self._arena[: stored.num_rows]
            self._pending = self._copier.start(rows, stored.position, stored.plan, self._transfers(stored.plan))

    def _transfers(self, plan: CapturePlan | CaptureBatch) -> tuple[Transfer, ...]:
        wanted: list[tuple[bytes, npt.NDArray[np.int64] | None]]
        if isinstance(plan, CapturePlan):
            wanted = [(stream.index.projection, stream.arena_rows) for stream in plan.streams]
        else:
            # Only the device knows the positions, so every transfer takes all rows.
            wanted = [(projection, None) for projection in plan.projections()]
        return tuple(
            Transfer(projection, rows, self._store.directions(projection) if projection else None)
            for projection, rows in wanted
        )

    def take_rows(self) -> tuple[PendingRows, ...]:
        """Return the captured rows of the last step, once."""
        pending, self._pending = self._pending, None
        return () if pending is None else (pending,)

    @contextmanager
    def enabled_on_every_rank(self) -> Iterator[None]:
        """Return rows on this rank inside the context, even if another rank returns the rows of requests."""
        enabled, self._enabled = self._enabled, True
        try:
            yield
        finally:
            self._enabled = enabled
