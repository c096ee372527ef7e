# SPDX-License-Identifier: Apache-2.0
"""Requests that the engine client refuses: faults of vLLM's CPU build, and live strengths that nothing can change."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_steer import LLM, Edit, SteeringError
from vllm_steer.compat.internals import LLM as VllmLLM
from vllm_steer.frontend import requests
from vllm_steer.frontend.live import check_live
from vllm_steer.frontend.requests import check_cpu_request, check_engine_request
from vllm_steer.llm import _one_thread
from vllm_steer.program.compiler import compile_program


def engine(speculative: bool = False, lora: bool = False) -> Any:
    return SimpleNamespace(
        speculative_config=object() if speculative else None, lora_config=object() if lora else None
    )  # fmt: skip


def params(**fields: Any) -> Any:
    return SimpleNamespace(**{"temperature": 0.0, "seed": None, "prompt_logprobs": None, **fields})


@pytest.mark.parametrize(
    ("config", "wanted", "field"),
    [
        (engine(speculative=True), params(temperature=0.7), "temperature"),
        (engine(lora=True), params(prompt_logprobs=1), "prompt_logprobs"),
    ],
)
def test_refuses_what_the_cpu_build_cannot_serve(
    config: Any, wanted: Any, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches wrong tokens of other requests and a dead engine on CPUs. Negative control: other devices serve it."""
    monkeypatch.setattr(requests, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    with pytest.raises(SteeringError) as refused:
        check_cpu_request(config, wanted)
    assert refused.value.field == field
    monkeypatch.setattr(requests, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    check_cpu_request(config, wanted)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (engine(speculative=True), params()),
        (engine(lora=True), params(temperature=0.7, seed=1)),
        (engine(), params(temperature=0.7, prompt_logprobs=1)),
        (engine(speculative=True, lora=True), None),
    ],
)
def test_serves_neighbours_of_refused_requests(config: Any, wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a refusal of a request that the CPU build serves."""
    monkeypatch.setattr(requests, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    check_cpu_request(config, wanted)


def test_refuses_live_strengths_under_data_parallelism() -> None:
    """Catches a request whose live strength is accepted and can never change."""
    edit: dict[str, Any] = {"kind": "add", "point": "post_block", "layers": 1, "vector": np.ones(4)}
    live, plain = (compile_program([Edit(**edit, **fields)]) for fields in ({"live": "calm"}, {}))

    def config(size: int) -> Any:
        return SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=size))

    with pytest.raises(SteeringError, match="calm cannot change with data parallelism"):
        check_live(config(2), live)
    check_live(config(2), plain)
    check_live(config(1), live)


def test_the_engine_client_checks_parameters_without_steering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a plain request that reaches the engine and gives its neighbours wrong tokens."""
    monkeypatch.setattr(requests, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    config = engine(speculative=True)
    processor = SimpleNamespace(vllm_config=config, _steering_context=object())
    request = SimpleNamespace(sampling_params=params(temperature=0.7), prompt_token_ids=[1], prompt_embeds=None)
    with pytest.raises(SteeringError, match="temperature"):
        check_engine_request(processor, request)
    request.sampling_params = params()
    check_engine_request(processor, request)


def test_an_llm_refuses_a_second_thread() -> None:
    """Catches results that two threads take from each other. Calls of one thread may be nested."""
    used = SimpleNamespace(_steering_thread=threading.RLock())
    problems: list[str] = []

    def inner(self: Any) -> str:
        return "inner"

    def outer(self: Any) -> str:
        def other() -> None:
            for call in (_one_thread(inner), partial(LLM.set_strength, request_id="a", calm=1.0)):
                try:
                    call(self)
                except SteeringError as error:
                    problems.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return str(_one_thread(inner)(self))

    assert _one_thread(outer)(used) == "inner"
    assert len(problems) == 2 and all("another thread is using this LLM" in each for each in problems)
    assert _one_thread(inner)(used) == "inner"
    for name in ("generate", "chat", "enqueue", "enqueue_chat", "wait_for_completion", "beam_search"):
        assert getattr(LLM, name) is not getattr(VllmLLM, name)
