# SPDX-License-Identifier: Apache-2.0
"""Copy of the records of a step's tokens to the host, in the format of captured rows.

All records of a step leave in one transfer, as wide as the widest of any running request. Their row index is reused
while the batch does not change, so a step costs a few array operations on the host, whatever its number of readouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from vllm_steer.capture.row_payload import RECORDS
from vllm_steer.capture.step_plan import CapturePlan, RowStream
from vllm_steer.capture.step_rows import IntArray, RowIndex
from vllm_steer.engine.device_to_host import DeviceToHostCopier, PendingRows, Transfer
from vllm_steer.engine.program_store import ProgramStore
from vllm_steer.engine.step_batch import StepBatch

_WIDTH_STEP = 4
"""Records leave with a multiple of this many columns, so that few shapes occur."""


@dataclass(frozen=True)
class UncertainRecords:
    """A plan of records whose positions only the device knows."""

    plan: CapturePlan
    token: IntArray
    """Index of each request's first token in the batch, ``[requests]``."""

    def plan_at(self, first: Sequence[int]) -> CapturePlan:
        """Return the plan for the given first positions, one per request."""
        return replace(self.plan, start=np.array(first, dtype=np.int64))


@dataclass(frozen=True)
class _Batch:
    """Requests of a step that have records, with what does not change from one decoding step to the next."""

    key: tuple[int, tuple[str, ...], bytes, bytes]
    streams: tuple[RowStream, ...]
    rows: IntArray | None
    """Index of each copied token in the batch; None for all."""
    token: IntArray
    num_tokens: int


class RecordCopy:
    """Records of one engine rank.

    Args:
        store: The rank's programs.
        copier: Copies rows to the host.
        enabled: Whether this rank returns records; one of the tensor-parallel ranks does.
        speculative: Whether draft tokens make the host's positions uncertain.
    """

    def __init__(self, store: ProgramStore, copier: DeviceToHostCopier, *, enabled: bool, speculative: bool) -> None:
        self._store = store
        self._copier = copier
        self._enabled = enabled
        self._speculative = speculative
        self._batch: _Batch | None = None
        self._planned: tuple[_Batch, CapturePlan | UncertainRecords, torch.Tensor | None] | None = None
        self._pending: PendingRows | None = None

    def plan(self, batch: StepBatch, recorded: npt.NDArray[np.int64]) -> None:
        """Choose the records that leave after the next forward pass.

        Args:
            batch: The step's batch.
            recorded: Indices of the requests in the batch whose records leave.
        """
        if not self._enabled:
            return
        first, count = batch.first[recorded], batch.count[recorded]
        steady = self._steady(batch, recorded, count)
        plan = CapturePlan(steady.streams, first, count, steady.num_tokens)
        if self._speculative:
            self._planned = steady, UncertainRecords(plan, steady.token), batch.layout().position
        else:
            self._planned = steady, plan, None

    def _steady(self, batch: StepBatch, recorded: npt.NDArray[np.int64], count: IntArray) -> _Batch:
        everyone = len(recorded) == len(batch.ids)
        ids = tuple(batch.ids) if everyone else tuple(batch.ids[i] for i in recorded.tolist())
        # The same requests can have other places among those without records.
        key = self._store.changes, ids, batch.count.tobytes(), recorded.tobytes()
        if self._batch is not None and self._batch.key == key:
            return self._batch
        width = min(-(-self._store.record_width // _WIDTH_STEP) * _WIDTH_STEP, self._store.tables.record.shape[1])
        token = (np.cumsum(batch.count) - batch.count)[recorded]
        rows = None
        if not everyone:
            rows = np.concatenate([np.arange(t, t + n) for t, n in zip(token.tolist(), count.tolist(), strict=True)])
        # The code is the width: rows of different widths are never joined.
        index = RowIndex(ids, ((width,),) * len(ids), RECORDS)
        # No arena rows: the transfer itself selects the tokens.
        stream = RowStream(index, np.arange(len(ids)), None)
        self._batch = _Batch(key, (stream,), rows, token, int(count.sum()))
        return self._batch

    def start_copy(self) -> None:
        """Start copying the records, after the forward pass and on the same stream."""
        planned, self._planned = self._planned, None
        if planned is None:
            return
        steady, plan, position = planned
        ((width,), *_) = steady.streams[0].index.codes
        tokens = steady.num_tokens if steady.rows is None else int(steady.rows[-1]) + 1
        stored = self._store.tables.record[:tokens, :width]
        self._pending = self._copier.start(stored, position, plan, (Transfer(RECORDS, steady.rows, None),))

    def take_rows(self) -> tuple[PendingRows, ...]:
        """Return the records of the last step, once."""
        pending, self._pending = self._pending, None
        return () if pending is None else (pending,)
