# SPDX-License-Identifier: Apache-2.0
"""Steering's overrides of runner V1."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

from vllm_steer.engine.runner_v1 import SteeringRunnerV1


class Runner:
    """Stand-in for vLLM's runner that records its profiling run and dummy runs."""

    max_num_tokens = 512

    def __init__(self, compiled: list[Any]) -> None:
        self.ran: list[Any] = []
        sets = SimpleNamespace(
            compile_untapped=lambda *given: compiled.extend(given), restore_model=lambda: self.ran.append("rest")
        )
        heads = SimpleNamespace(warm_up=lambda: None)
        self.steering = SimpleNamespace(heads=heads, graph_sets=sets, begin_idle_step=lambda: self.ran.append("idle"))

    def profile_run(self, randomize_inputs: bool = False) -> None:
        self.ran.append(("profile", randomize_inputs))

    def _dummy_run(self, tokens: int, **how: bool) -> tuple[str, str]:
        self.ran.append((tokens, how))
        return "hidden states", "of samples"


def test_profile_run_forwards_arguments() -> None:
    """Catches a dropped argument, without which an engine on a GPU does not start."""
    compiled: list[Any] = []
    runner: Any = type("Steered", (SteeringRunnerV1, Runner), {})(compiled)
    runner.profile_run(randomize_inputs=True)
    assert runner.ran == [("profile", True)]
    run, most_tokens = compiled
    assert (run(7), most_tokens) == ("hidden states", 512)
    assert runner.ran[1:] == ["idle", (7, {"is_profile": True}), "rest"]


@pytest.mark.parametrize("runner", [RunnerV1, RunnerV2])
def test_profile_run_signature(runner: Any) -> None:
    """Catches a vLLM version whose profiling run takes other arguments than the stand-ins here."""
    assert list(inspect.signature(runner.profile_run).parameters) == ["self", "randomize_inputs"]
