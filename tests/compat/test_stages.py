# SPDX-License-Identifier: Apache-2.0
"""Tests of the list of vLLM's methods that this package joins."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_steer.compat.stages import LIFECYCLE, REQUEST_STAGES, STARTUP, checks_without_steering, front_end_joins
from vllm_steer.compat.wraps import How, Join, load

WITHOUT = {*checks_without_steering(serves=False), *checks_without_steering(serves=True)}
ALL = (*STARTUP, *front_end_joins(), *LIFECYCLE, *WITHOUT)


@pytest.mark.parametrize("join", ALL, ids=lambda join: f"{join.method}-{join.runs}")
def test_both_sides_of_a_join_exist(join: Join) -> None:
    """Catches a renamed function of ours, and a vLLM without the method."""
    assert callable(load(join.method))
    assert callable(load(join.runs))


def test_each_stage_is_described_once() -> None:
    """Catches a stage without a description or listed twice."""
    assert len({stage.name for stage in REQUEST_STAGES}) == len(REQUEST_STAGES)
    assert all(stage.takes and stage.passes_on for stage in REQUEST_STAGES)


def overriding_classes() -> dict[Any, Any]:
    """Return our subclasses of vLLM's classes, each with the class of vLLM whose methods it may override."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu.model_states.interface import ModelState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_steer.engine.executor import RowAggregator, RowsOfAllStages
    from vllm_steer.engine.runner_v1 import SteeringRunnerV1
    from vllm_steer.engine.runner_v2 import SteeringRunnerV2, _steering_state
    from vllm_steer.engine.scheduler import SteeringSchedulerMixin
    from vllm_steer.engine.worker import SteeringWorker
    from vllm_steer.plugin.request_state import SteeredRequestState

    return {
        SteeredRequestState: RequestState,
        SteeringSchedulerMixin: Scheduler,
        SteeringWorker: Worker,
        SteeringRunnerV1: RunnerV1,
        SteeringRunnerV2: RunnerV2,
        _steering_state(ModelState): ModelState,
        RowsOfAllStages: MultiprocExecutor,
        RowAggregator: KVOutputAggregator,
    }


def overridden() -> Iterator[str]:
    """Yield every method of vLLM that one of our subclasses overrides."""
    for ours, base in overriding_classes().items():
        for name, value in vars(ours).items():
            if inspect.isfunction(value) and name != "__init__" and hasattr(base, name):
                yield f"{base.__module__}:{base.__qualname__}.{name}"


def test_lists_exactly_the_overridden_methods() -> None:
    """Catches an override that the list lacks, and a row whose override is gone."""
    listed = {join.method for join in ALL if join.how is How.OVERRIDE and not join.runs.startswith("vllm_steer.taps")}
    assert set(overridden()) == listed


def test_start_up_imports_no_front_end() -> None:
    """Catches a plugin that loads the server into worker processes."""
    modules = {join.method.partition(":")[0] for join in STARTUP}
    assert modules == {"vllm.engine.arg_utils"}
