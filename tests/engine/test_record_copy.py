# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch whose records leave the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_steer.engine.device_to_host import DeviceToHostCopier
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


@pytest.mark.parametrize("ahead", [0, 5], ids=["certain", "drafts"])
def test_records_of_steps_with_several_tokens(ahead: int) -> None:
    """Catches records of a neighbour or of another token, columns cut off, and the plan or positions of another step.

    With drafts, the host's positions are ahead of the device's.
    """
    record, first = torch.arange(16.0)[:, None].repeat(1, 16), np.array([10, 20, 30, 40])
    store: Any = SimpleNamespace(changes=0, record_width=0, tables=SimpleNamespace(record=record))
    copy = RecordCopy(store, DeviceToHostCopier(torch.device("cpu")), enabled=True, speculative=ahead > 0)
    for recorded in ([1, 3], [0, 1, 2, 3], [0, 2]):
        for store.changes, store.record_width, columns in ((1, 5, 8), (2, 9, 12), (3, 15, 16)):
            for count in ([3, 2, 1, 3], [1, 1, 4, 2], [3, 2, 1, 3]):
                position = torch.cat([torch.arange(start, start + n) for start, n in zip(first, count, strict=True)])
                layout: Any = SimpleNamespace(position=position)
                batch = StepBatch(lambda: layout, [*"abcd"], first, first + ahead, np.array(count), 16)  # noqa: B023
                copy.plan(batch, np.array(recorded))
                copy.start_copy()
                (pending,) = copy.take_rows()
                (step,) = pending.wait()
                assert step.index.request_ids == tuple("abcd"[i] for i in recorded)
                for place, i in enumerate(recorded):
                    found = step.rows_of(place).view(np.float32)
                    own = np.arange(count[i]) + sum(count[:i])
                    assert step.start[place] == first[i] and step.index.codes[place] == (columns,)
                    np.testing.assert_array_equal(found, np.repeat(own[:, None], columns, axis=1))
