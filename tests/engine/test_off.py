# SPDX-License-Identifier: Apache-2.0
"""Tests of an engine without enable_steering: it is stock vLLM and refuses steering."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.answers import params, prompt, run, tokens_of
from tests.engine.conftest import opened
from tests.tiny import direction
from vllm_steer import SteeringError


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def objects_of_this_package(llm: Any) -> list[str]:
    """Return everything in the engine that comes from this package: classes, wrapped methods, context entries."""
    worker = worker_of(llm)
    config = worker.vllm_config
    found = [type(x).__module__ for x in (worker, worker.model_runner, scheduler_of(llm))]
    for module in worker.model_runner.get_model().modules():
        found.append(type(module).__module__)
        found.extend(
            value.__module__ for value in vars(module).values() if callable(value) and hasattr(value, "__module__")
        )
    found.extend(type(value).__module__ for value in config.compilation_config.static_forward_context.values())
    found.extend(f"vllm_steer in additional_config: {name}" for name in (config.additional_config or {}))
    return [name for name in found if name and name.startswith("vllm_steer")]


@pytest.fixture(scope="module")
def stock(tiny_llama: Path) -> Iterator[Any]:
    with opened(tiny_llama, enable_steering=False) as engine:
        yield engine


def test_stock_engine_has_no_objects_of_this_package(stock: Any) -> None:
    """Catches a plugin that changes every engine once it is installed."""
    assert objects_of_this_package(stock) == []


def test_rejects_steering_and_keeps_serving(stock: Any) -> None:
    """Catches steering that is accepted and ignored."""
    with pytest.raises(SteeringError, match="--enable-steering"):
        run(stock, [prompt(1, 2, 3)], [params(steering_vectors={"post_block": {1: direction(1)}})])
    assert len(tokens_of(run(stock, [prompt(1, 2, 3)], [params()])[0])) == 6


def test_search_finds_objects_in_a_steering_engine(llm: Any) -> None:
    """Negative control of the first test."""
    assert len(objects_of_this_package(llm)) > 12


def test_plain_requests_use_vllm_methods(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches (1) work for outputs and scheduling of plain requests and (2) steered requests without it."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.output_processor import RequestState

    from vllm_steer.plugin.request_state import SteeredRequestState

    engine, scheduler = llm.llm_engine, scheduler_of(llm)
    monkeypatch.setattr(scheduler._arena, "rows", 64)  # less than the tokens of a step
    states = engine.output_processor.request_states

    def last_word() -> Any:
        return scheduler._reserve_prefill_lookahead.__func__

    def types() -> dict[str, type]:
        return {state.external_req_id: type(state) for state in states.values()}

    engine.add_request("plain", prompt(1, 2, 3), params(30))
    engine.add_request("steered", prompt(1, 2, 3), params(4, steering_vectors={"post_block": {1: direction(1)}}))
    assert types() == {"plain": RequestState, "steered": SteeredRequestState}
    engine.step()
    assert last_word() is Scheduler._reserve_prefill_lookahead
    engine.add_request("read", prompt(1, 2, 3), params(4, capture={"memory": {"hooks": {"post_block": [1]}}}))
    assert types()["read"] is SteeredRequestState
    engine.step()
    assert last_word().__module__ == "vllm_steer.engine.scheduler"
    done = []
    while engine.has_unfinished_requests():
        done += [output for output in engine.step() if output.finished]
    assert last_word() is Scheduler._reserve_prefill_lookahead
    found = {output.request_id: (output.capture_results is None, output.steering_applied is None) for output in done}
    assert found == {"plain": (True, True), "steered": (True, False), "read": (False, True)}
