# SPDX-License-Identifier: Apache-2.0
"""Tests of several engines behind one front end, as under data parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine import scheduler_harness
from tests.engine.steps import step_of
from vllm_steer.capture.row_assembler import RowChunk
from vllm_steer.capture.row_payload import ROWS_REQUEST_ID, decode_step
from vllm_steer.engine.row_sender import RowSender

CAPTURE = {"memory": {"hooks": {"post_block": [1]}, "positions": "last_prompt"}}


def rows_by_engine(tiny_llama: Path) -> list[list[Any]]:
    """Return the rows that two engines send, each with one request that captures one row."""
    found = []
    for number in range(2):
        scheduler = scheduler_harness.make(scheduler_harness.config(tiny_llama, sequences=2), blocks=12)
        name = f"request-{number}"
        scheduler.add_request(scheduler_harness.request(name, [1, 2, 3], 1, capture=CAPTURE))
        rows = np.full(64, number, "f4").tobytes()
        outputs = scheduler_harness.finish_step(
            scheduler, scheduler.schedule(), (step_of([RowChunk(name, 2, 1, (8,), rows)], 256),)
        )
        found.append([output for output in outputs if output.request_id == ROWS_REQUEST_ID])
    return found


def check(tiny_llama: Path) -> None:
    for number, carriers in enumerate(rows_by_engine(tiny_llama)):
        assert [decode_step(each.kv_transfer_params, each.routed_experts).index.request_ids for each in carriers] == [
            (f"request-{number}",)
        ]
        assert carriers[0].routed_experts.view("f4").tolist() == [[number] * 64]


@pytest.mark.failure(19)
@pytest.mark.failure(19, control=True)
def test_every_engine_sends_its_rows(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches captures from engine 0 only. The control is an engine 1 that keeps its rows."""
    check(tiny_llama)
    real = RowSender.collect
    monkeypatch.setattr(
        RowSender, "collect", lambda self, out, live: None if "request-1" in live else real(self, out, live)
    )
    with pytest.raises(AssertionError):
        check(tiny_llama)
