# SPDX-License-Identifier: Apache-2.0
"""Copy of the records of a step's tokens to the host, in the format of captured rows.

All records of a step leave in one transfer, as wide as the widest of any running request. Their row index is reused
while the batch does not change, so a step costs a few array operations on the host, whatever its number of readouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from vllm_steer.capture.row_payload import RECORDS
from vllm_steer.capture.step_plan import CapturePlan, RowStream, UncertainPlan
from vllm_steer.capture.step_rows import IntArray, RowIndex
from vllm_steer.engine.device_to_host import Transfer
from vllm_steer.engine.row_capture import StepCopy
from vllm_steer.engine.step_batch import StepBatch

_WIDTH_STEP = 4
"""Records leave with a multiple of this many columns, so that few shapes occur."""


@dataclass(frozen=True)
class _Batch:
    """Requests of a step that have records, with what does not change from one decoding step to the next."""

    key: tuple[int, tuple[str, ...], bytes, bytes]
    streams: tuple[RowStream, ...]
    width: int
    rows: IntArray | None
    """Index of each copied token in the batch; None for all."""
    token: IntArray
    """Index of each request's first token in the batch, ``[requests]``."""
    num_tokens: int


class RecordCopy(StepCopy):
    """Records of one engine rank."""

    _batch: _Batch | None = None

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

        def plan_at(first: Sequence[int]) -> CapturePlan:
            return replace(plan, start=np.array(first, dtype=np.int64))

        tokens = steady.num_tokens if steady.rows is None else int(steady.rows[-1]) + 1
        self._planned = partial(
            self._copier.start,
            self._store.tables.record[:tokens, : steady.width],
            batch.layout().position if self._speculative else None,
            UncertainPlan(steady.token, plan_at) if self._speculative else plan,
            (Transfer(RECORDS, steady.rows, None),),
        )

    def _steady(self, batch: StepBatch, recorded: npt.NDArray[np.int64], count: IntArray) -> _Batch:
        ids = batch.ids_of(recorded)
        # The same requests can have other places among those without records.
        key = self._store.changes, ids, batch.count.tobytes(), recorded.tobytes()
        if self._batch is not None and self._batch.key == key:
            return self._batch
        width = min(-(-self._store.record_width // _WIDTH_STEP) * _WIDTH_STEP, self._store.tables.record.shape[1])
        token = (np.cumsum(batch.count) - batch.count)[recorded]
        rows = None
        if len(ids) < len(batch.ids):
            stops = np.cumsum(count)
            rows = np.arange(stops[-1]) + np.repeat(token - stops + count, count)
        # The code is the width: rows of different widths are never joined.
        index = RowIndex(ids, ((width,),) * len(ids), RECORDS)
        # No arena rows: the transfer itself selects the tokens.
        stream = RowStream(index, np.arange(len(ids)), None)
        self._batch = _Batch(key, (stream,), width, rows, token, int(count.sum()))
        return self._batch
