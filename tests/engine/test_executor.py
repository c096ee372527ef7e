# SPDX-License-Identifier: Apache-2.0
"""Tests of rows on outputs, of the buffers that they arrive in, and of the choice of the executor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_steer.capture.step_plan import CapturePlan, RowStream
from vllm_steer.capture.step_rows import RowIndex, StepRows
from vllm_steer.config import EXECUTOR_CLS, choose_executor, rows_of_all_stages
from vllm_steer.engine import device_to_host
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

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Copier(device_to_host.DeviceToHostCopier):
    """A copier to pageable memory."""

    def step(self, value: int, rows: int = 8) -> StepRows:
        """Return the rows of a step, all with one value."""
        one = np.ones(1, dtype=np.int64)
        index = RowIndex(("a",), ((0,),))
        plan = CapturePlan((RowStream(index, 0 * one, None),), 0 * one, rows * one, rows)
        some = torch.empty(32, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)
        buffers = self._free.popleft() if self._free else device_to_host._PinnedBuffers(*some, Event())
        given = {b"": torch.full((rows, 4), value, dtype=torch.uint8)}
        (step,) = self._copy(given, None, plan, buffers, torch.Tensor.copy_).wait()
        return step


def test_large_rows_keep_their_buffers_until_they_are_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows that a later step overwrites while they are sent, a copy of each, and buffers without a bound."""
    monkeypatch.setattr(device_to_host, "_LENT_BYTES", 32)
    copier = Copier(torch.device("cpu"))
    steps = [copier.step(value) for value in range(6)]
    assert [step.rows.flags.owndata for step in steps] == [False] * 4 + [True] * 2
    assert [set(step.rows.ravel().tolist()) for step in steps] == [{value} for value in range(6)]
    assert len(copier._free) == 1, "the buffers of a copy were not used again"
    sent = steps[3].rows[1:].data.cast("B")
    del steps
    assert len(copier._free) == 4
    assert copier.step(9, rows=7).rows.flags.owndata, "small rows have memory of their own"
    others = [copier.step(8) for _ in range(5)]
    assert [step.rows.flags.owndata for step in others] == [False] * 3 + [True] * 2
    assert set(sent) == {3}
    sent.release()
    del others
    assert len(copier._free) == 5 and not copier._lent


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
