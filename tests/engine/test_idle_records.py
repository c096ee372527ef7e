# SPDX-License-Identifier: Apache-2.0
"""Records and positions of steps in which no token of the batch is edited or captured."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from tests.engine.steps import make_tables
from vllm_steer import Edit, SamplingParams, SteeringConfig
from vllm_steer.engine.program_store import ProgramStore
from vllm_steer.engine.step_batch import StepBatch
from vllm_steer.engine.worker_manager import WorkerSteeringManager
from vllm_steer.taps.assignment import BatchLayout
from vllm_steer.taps.ops import DeviceOps

HIDDEN, LAYERS, SITES, SLOT, PROMPT_LEN = 8, 3, 9, 1, 6


def make_manager() -> WorkerSteeringManager:
    config = SteeringConfig(max_rows=8, max_vectors=8, max_instructions=64, capture_rows=8)
    tables = make_tables(config, num_sites=SITES, max_tokens=32)
    decoder: Any = None
    return WorkerSteeringManager(
        decoder, ProgramStore(tables, config, LAYERS), MagicMock(), DeviceOps(), {}, heads={}, no_lens=None,
        captures=True, speculative=False, compare_plain_code=False,
    )  # fmt: skip


def run_step(manager: WorkerSteeringManager, first: int, count: int) -> None:
    """Run a step without a model, of a request in ``SLOT`` with the id "r"."""
    layout = BatchLayout(
        torch.tensor([SLOT]),
        torch.tensor([0, count], dtype=torch.int32),
        torch.arange(first, first + count),
        torch.zeros(count, dtype=torch.int32),
    )
    manager.begin_step(
        StepBatch(lambda: layout, ["r"], np.array([SLOT]), np.array([first]), np.array([count]), num_padded=count)
    )
    manager.end_step()


@pytest.mark.parametrize("tokens", [{"generated": [[4, None]]}, {"generated": [[0, 2]]}, "generated"])
def test_steps_without_edits_have_records(tokens: Any) -> None:
    """Catches a live strength without a trace or with an old position where the edit covers no token of the step.

    Such a step must also run without taps.
    """
    manager = make_manager()
    edit = Edit(kind="add", point="post_block", layers=1, vector=np.ones(HIDDEN), tokens=tokens, live="calm")
    manager.store.add("r", SLOT, SamplingParams(steering=[edit]), PROMPT_LEN)
    graph_sets: Any = manager.graph_sets
    covered = edit.tokens.intervals(PROMPT_LEN)
    column = manager.store.resolved_of("r").records.layout.live["calm"]  # type: ignore[union-attr]
    first = 0
    for number, count in enumerate((PROMPT_LEN, 1, 1, 1, 1, 1, 1)):
        strength = float(number)
        graph_sets.reset_mock()
        assert manager.store.set_strengths("r", {"calm": strength}) == first
        run_step(manager, first, count)
        (pending,) = manager.take_rows()
        assert (pending.plan.start.tolist(), pending.plan.count.tolist()) == ([first], [count])
        assert manager.tables.record[:count, column].tolist() == [strength] * count
        edited = any(start < first + count and first < stop for start, stop in covered)
        assert graph_sets.select.called == edited
        assert graph_sets.select_idle.called != edited
        first += count
