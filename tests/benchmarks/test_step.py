# SPDX-License-Identifier: Apache-2.0
"""Tests of benchmarks.step without its engines."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import pytest

from benchmarks import step
from benchmarks.step import IDLE, LOADS, REQUESTS, SPREAD, STOCK, WAYS, Clock
from vllm_steer import SamplingParams
from vllm_steer.params import program_bytes


@pytest.mark.parametrize("way", WAYS)
def test_only_own_vectors_differ(way: str) -> None:
    """Catches an idle way that steers, a way without a program, and own vectors that all requests share."""
    first, second = (program_bytes(SamplingParams(**step.fields(way, number))) for number in (1, 2))
    assert (first is None) == (way == IDLE)
    assert (first != second) == (way == "own vectors")


def test_device_work_is_no_host_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an operation of this package that counts as time of the host."""
    clock, now = Clock(), 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "thread_time", lambda: now)
    operation = clock.timed(spend, "operations")

    def run() -> None:
        spend(1.0)
        operation(300.0)

    clock.timed(run, "step")()
    clock.timed(spend, "arrival")(4000.0)
    expected = {"host": 4001.0, "operations": 300.0, "steps": 1, "requests": 5}
    assert clock.take(5) == expected
    assert clock.take(0)["host"] == 0


def test_ratios_are_within_a_round() -> None:
    """Catches a ratio of medians of different rounds, and a mean over requests instead of steps."""

    def round_of(stock: float, idle: float) -> Any:
        shared = {"operations": 0.0, "requests": REQUESTS}
        ways = {STOCK: {"host": stock, "steps": 10, **shared}, IDLE: {"host": idle, "steps": 20, **shared}}
        return dict.fromkeys(LOADS, ways)

    found = step.summary([round_of(1.0, 2.0), round_of(10.0, 40.0), round_of(2.0, 4.0)])
    assert found[SPREAD][IDLE]["ratio"] == 1.0
    assert found["arrivals"] == {IDLE: {"us per request beyond stock": round(2e6 / REQUESTS, 1)}}


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "_model_forward"),
        ("vllm.model_executor.models.llama:LlamaForCausalLM", "compute_logits"),
        ("vllm.v1.engine.core:EngineCore", "preprocess_add_request"),
        ("vllm.v1.engine.core:EngineCore", "add_request"),
        ("vllm_steer.engine.runner_v1:SteeringRunnerV1", "_zero_block_ids"),
        ("vllm_steer.engine:model_setup", "device_ops"),
    ],
)
def test_timed_parts_exist(owner: str, name: str) -> None:
    """Catches a rename, after which a part would be counted as another one or the model computed."""
    module, _, attribute = owner.partition(":")
    import_module(f"{module}.{attribute}" if attribute == "model_setup" else module)
    assert callable(getattr(getattr(import_module(module), attribute), name))
