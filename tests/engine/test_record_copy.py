# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch whose records leave the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_steer.engine.record_copy import RecordCopy
from vllm_steer.engine.step_batch import StepBatch


def rows_planned(copy: RecordCopy, ids: list[str], recorded: list[int]) -> list[int]:
    """Plan a step of one token per request and return the rows of the record table that leave."""
    ones = np.ones(len(ids), dtype=np.int64)
    layout: Any = None
    batch = StepBatch(layout, ids, ones, ones, ones, len(ids))
    copier: Any = SimpleNamespace(start=lambda stored, position, plan, transfers: transfers)
    copy._copier = copier
    copy.plan(batch, np.array(recorded))
    copy.start_copy()
    (transfers,) = copy.take_rows()
    (transfer,) = transfers  # type: ignore[misc]
    return transfer.rows.tolist()


def test_follows_a_request_to_another_place_in_the_batch() -> None:
    """Catches the records of a neighbour, after vLLM has reordered a batch without a change of programs."""
    tables = SimpleNamespace(record=torch.zeros(8, 16))
    store: Any = SimpleNamespace(changes=1, record_width=4, tables=tables)
    copy = RecordCopy(store, None, enabled=True, speculative=False)  # type: ignore[arg-type]
    assert rows_planned(copy, ["plain", "other", "read"], [2]) == [2]
    assert rows_planned(copy, ["plain", "read", "other"], [1]) == [1]
