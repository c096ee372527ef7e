# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step leave the device, and the start of their copy to the host: captured rows here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from vllm_steer.capture.step_plan import CaptureBatch, CapturePlan, SteadyCaptureBatch, UncertainPlan
from vllm_steer.capture.step_rows import IntArray
from vllm_steer.engine.device_to_host import DeviceToHostCopier, PendingRows, Transfer
from vllm_steer.engine.program_store import ProgramStore
from vllm_steer.engine.step_batch import StepBatch


class StepCopy:
    """Rows of one engine rank that leave the device after each step. The copy is planned before the forward pass.

    Args:
        store: The rank's programs.
        copier: Copies rows to the host.
        enabled: Whether this rank returns rows. The tensor-parallel ranks have the same rows; one returns them.
        speculative: Whether draft tokens make the host's positions uncertain.
    """

    def __init__(self, store: ProgramStore, copier: DeviceToHostCopier, *, enabled: bool, speculative: bool) -> None:
        self._store = store
        self._copier = copier
        self._enabled = enabled
        self._speculative = speculative
        self._planned: Callable[[], PendingRows] | None = None
        self._pending: PendingRows | None = None

    def start_copy(self) -> None:
        """Start the planned copy, after the forward pass and on the same stream."""
        planned, self._planned = self._planned, None
        if planned is not None:
            self._pending = planned()

    def take_rows(self) -> tuple[PendingRows, ...]:
        """Return the rows of the last step, once."""
        pending, self._pending = self._pending, None
        return () if pending is None else (pending,)


class RowCapture(StepCopy):
    """Captured rows of one engine rank."""

    _steady: tuple[int, SteadyCaptureBatch] = (-1, SteadyCaptureBatch((), ()))

    def plan(self, batch: StepBatch, capturing: npt.NDArray[np.int64]) -> None:
        """Choose the rows that the next forward pass stores and that leave after it.

        Args:
            batch: The step's batch.
            capturing: Indices of the requests in the batch that capture in this step.
        """
        if not self._enabled:
            return
        store, ids, position = self._store, batch.ids_of(capturing), None
        first, count, slots = batch.first[capturing], batch.count[capturing], batch.request_slot[capturing]
        plan: CapturePlan | UncertainPlan
        certain: CapturePlan | None
        wanted: list[tuple[bytes, IntArray | None]]
        if not self._speculative and (first >= store.last_segment[slots]).all():
            certain = self._steady_batch(ids, slots).plan(first, count)
        else:
            captures = CaptureBatch(ids, tuple(store.resolved_of(name) for name in ids), count)
            certain = None if self._speculative else captures.plan_at(first.tolist())
        if certain is not None:
            plan, num_rows = certain, certain.num_rows
            wanted = [(stream.index.projection, stream.arena_rows) for stream in certain.streams]
        else:
            # Only the device knows the positions, so every transfer takes all rows.
            plan = UncertainPlan((np.cumsum(batch.count) - batch.count)[capturing], captures.plan_at)
            num_rows, position = captures.max_captured_rows(), batch.layout().position
            wanted = [(projection, None) for projection in captures.projections()]
        stored = store.tables.arena[:num_rows]

        def start() -> PendingRows:
            transfers = (Transfer(name, rows, store.directions(name) if name else None) for name, rows in wanted)
            return self._copier.start(stored, position, plan, tuple(transfers))

        self._planned = start if len(stored) else None

    def _steady_batch(self, ids: tuple[str, ...], slots: IntArray) -> SteadyCaptureBatch:
        """Return the plan of a batch in which every request has reached its last segment.

        It stays valid until a request is added or removed, or the batch order changes.
        """
        changes, steady = self._steady
        if changes != self._store.changes or steady.request_ids != ids:
            steady = SteadyCaptureBatch(ids, tuple(self._store.last_program[slots].tolist()))
            self._steady = (self._store.changes, steady)
        return steady

    @contextmanager
    def enabled_on_every_rank(self) -> Iterator[None]:
        """Return rows on this rank inside the context, even if another rank returns the rows of requests."""
        enabled, self._enabled = self._enabled, True
        try:
            yield
        finally:
            self._enabled = enabled
