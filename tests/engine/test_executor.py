# SPDX-License-Identifier: Apache-2.0
"""Tests of rows of several pipeline stages on one output, and of the choice of the executor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_steer.capture.step_plan import CapturePlan, RowStream
from vllm_steer.capture.step_rows import RowIndex
from vllm_steer.config import EXECUTOR_CLS, choose_executor, rows_of_all_stages
from vllm_steer.engine.device_to_host import PendingRows
from vllm_steer.engine.executor import RowAggregator
from vllm_steer.engine.model_output import ROWS_ATTRIBUTE, AsyncOutput, attach_rows


def output(*rows: str) -> Any:
    made = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    if rows:
        setattr(made, ROWS_ATTRIBUTE, rows)
    return made


class Upstream:
    """A KV connector's aggregator that returns an output of its own."""

    def aggregate(self, outputs: list[Any], output_rank: int) -> Any:
        return None if outputs[output_rank] is None else output("of upstream")


@pytest.mark.feature("pipeline parallel", "capture")
def test_adds_the_rows_of_every_stage() -> None:
    """Catches rows of one stage taken for all, and lost aggregation of a KV connector."""
    stages = [output("a", "b"), output(), output("c")]
    assert RowAggregator().aggregate(stages, 2) is stages[2]
    assert getattr(stages[2], ROWS_ATTRIBUTE) == ("a", "b", "c")
    joined = RowAggregator(Upstream()).aggregate([output("a"), output("c")], 1)
    assert getattr(joined, ROWS_ATTRIBUTE) == ("a", "c")


def test_leaves_steps_without_rows_unchanged() -> None:
    """Catches an attribute on every output, and a failure for a step without output."""
    assert not hasattr(RowAggregator().aggregate([output(), output()], 1), ROWS_ATTRIBUTE)
    for upstream in (None, Upstream()):
        assert RowAggregator(upstream).aggregate([None, None], 1) is None


def test_attaches_no_rows_to_the_shared_empty_output() -> None:
    """Catches rows of one step on every later empty output."""
    one = np.ones(1, dtype=np.int64)
    plan = CapturePlan((RowStream(RowIndex(("a",), ((0,),)), 0 * one, None),), 0 * one, one, 1)
    rows = torch.ones(1, 4).view(torch.uint8)
    for pending in (PendingRows(plan, {b"": rows}), PendingRows(plan, {b"": rows}, event=Event())):
        given = attach_rows(EMPTY_MODEL_RUNNER_OUTPUT, (pending,))
        assert isinstance(given, AsyncOutput) == (pending.event is not None)
        (step,) = getattr(given.get_output() if pending.event else given, ROWS_ATTRIBUTE)
        assert step.rows_of(0).tobytes() == rows.numpy().tobytes()
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, ROWS_ATTRIBUTE)


class Event:
    """A copy that has completed."""

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize(
    ("stages", "backend", "connector", "chosen", "complete"),
    [
        (2, "mp", None, EXECUTOR_CLS, True),
        (1, "mp", None, "mp", True),
        (1, "uni", None, "uni", True),
        (2, "ray", object(), "ray", False),
        (2, "external_launcher", None, "external_launcher", False),
        (2, "mp", object(), "mp", False),
    ],
)
def test_sets_the_executor_for_pipeline_stages_only(
    stages: int, backend: str, connector: Any, chosen: str, complete: bool
) -> None:
    """Catches a replaced executor of the user, and captures accepted where rows of stages are lost."""
    parallel = SimpleNamespace(pipeline_parallel_size=stages, distributed_executor_backend=backend)
    config = SimpleNamespace(parallel_config=parallel, ec_transfer_config=connector)
    choose_executor(config)
    assert parallel.distributed_executor_backend == chosen
    assert rows_of_all_stages(config) is complete


@pytest.mark.parametrize("newer", [True, False])
def test_ray(newer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches captures accepted with the earlier executor for Ray, which drops the rows of earlier stages."""
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", str(int(newer)))
    for stages in (1, 2):
        parallel = SimpleNamespace(pipeline_parallel_size=stages, distributed_executor_backend="ray")
        config = SimpleNamespace(parallel_config=parallel, ec_transfer_config=None)
        choose_executor(config)
        backend = parallel.distributed_executor_backend
        assert getattr(backend, "uses_ray", False) is newer
        assert (backend == "ray") is not newer
        assert rows_of_all_stages(config) is (newer or stages == 1)
