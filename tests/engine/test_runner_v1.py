# SPDX-License-Identifier: Apache-2.0
"""What vLLM's workers ask of runner V1, which on a GPU is the fallback."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

from vllm_steer.engine.runner_v1 import SteeringRunnerV1


class Runner:
    """In the place of vLLM's: notes its profiling run and what else it runs."""

    max_num_tokens = 512

    def __init__(self, compiled: list[Any]) -> None:
        self.ran: list[Any] = []
        sets = SimpleNamespace(
            compile_untapped=lambda *given: compiled.extend(given), restore_model=lambda: self.ran.append("rest")
        )
        self.steering = SimpleNamespace(graph_sets=sets, begin_idle_step=lambda: self.ran.append("idle"))

    def profile_run(self, randomize_inputs: bool = False) -> None:
        self.ran.append(("profile", randomize_inputs))

    def _dummy_run(self, tokens: int, **how: bool) -> tuple[str, str]:
        self.ran.append((tokens, how))
        return "hidden states", "of samples"


def test_the_profiling_run_is_what_the_gpu_worker_asks_for() -> None:
    """Catches an argument that does not get through, without which an engine on a GPU does not start."""
    compiled: list[Any] = []
    runner: Any = type("Steered", (SteeringRunnerV1, Runner), {})(compiled)
    runner.profile_run(randomize_inputs=True)
    assert runner.ran == [("profile", True)]
    run, most_tokens = compiled
    assert (run(7), most_tokens) == ("hidden states", 512)
    assert runner.ran[1:] == ["idle", (7, {"is_profile": True}), "rest"]


@pytest.mark.parametrize("runner", [RunnerV1, RunnerV2])
def test_a_profiling_run_takes_what_is_handed_on(runner: Any) -> None:
    """Catches a profiling run of another vLLM that has other arguments than the runners here stand in for."""
    assert list(inspect.signature(runner.profile_run).parameters) == ["self", "randomize_inputs"]
