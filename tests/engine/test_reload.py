# SPDX-License-Identifier: Apache-2.0
"""Tests of cache resets, weight reloads and sleep with running requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.engine import hf
from tests.engine.answers import logprobs_of, params, prompt, run, tokens_of
from tests.engine.captures import capture, close_to, result
from tests.engine.conftest import opened
from tests.tiny import direction, save_autoencoder, save_tiny_llama

LAYER, VECTOR = 1, direction(1)
EDIT = {"post_attn": {LAYER: VECTOR}}
TOPICS = {"topics": {"sae": "tiny", "top_k": 4, "point": "post_block", "layer": 2, "positions": "all"}}


@pytest.fixture(scope="module")
def llm(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    sae = save_autoencoder(tmp_path_factory.mktemp("sae"))
    with opened(tiny_llama, steering_config={"saes": {"tiny": str(sae)}}) as engine:
        yield engine


def workload() -> tuple[list[Any], list[Any]]:
    """Return two steered requests with captures and a plain one."""
    prompts = [prompt(*range(first, first + 30)) for first in (5, 20, 35)]
    steered = [
        params(12, steering_vectors={"post_block": {1: direction(i)}}, capture=capture(), readouts=TOPICS)
        for i in range(2)
    ]
    return prompts, [*steered, params(12)]


def interrupted(llm: Any, act: Callable[[], Any]) -> list[Any]:
    """Run the workload with ``act`` after the fourth step, without blocks of an earlier run."""
    llm.reset_prefix_cache()
    for i, (p, wanted) in enumerate(zip(*workload(), strict=True)):
        llm.llm_engine.add_request(str(i), p, wanted)
    done = {}
    steps = 0
    while llm.llm_engine.has_unfinished_requests():
        done.update({int(output.request_id): output for output in llm.llm_engine.step() if output.finished})
        steps += 1
        if steps == 4:
            act()
    assert steps > 8
    return [done[i] for i in range(3)]


def same(got: list[Any], right: list[Any]) -> bool:
    return all(
        tokens_of(a) == tokens_of(b) and np.allclose(logprobs_of(a), logprobs_of(b), atol=1e-3)
        for a, b in zip(got, right, strict=True)
    )


@pytest.fixture(scope="module")
def truth(llm: Any) -> list[Any]:
    return run(llm, *workload())


@pytest.mark.feature("reset_prefix_cache", "steer", "capture")
def test_requests_survive_a_cache_reset(llm: Any, truth: list[Any]) -> None:
    """Catches lost or duplicate rows of a request that the reset preempts."""
    got = interrupted(llm, lambda: llm.llm_engine.reset_prefix_cache(reset_running_requests=True))
    assert same(got, truth)
    for i in range(2):
        close_to(result(got[i]), result(truth[i]), i)


def features_close_to(got: Any, right: Any) -> None:
    """Compare the features that an autoencoder found."""
    found, expected = (each.outputs[0].readouts["topics"] for each in (got, right))
    assert found.positions.tolist() == expected.positions.tolist()
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-3, atol=1e-2)
    assert (found.values > 0).any()
    assert (found.indices == expected.indices).mean() > 0.95


def discard(worker: Any, level: int = 1) -> None:
    """Empty the tensors of the weights' memory pool, as sleep level 2 does on a GPU, but keep the weights."""
    runner = worker.model_runner
    for owner in (runner.steering.tables, *runner.steering.heads.heads.values()):
        for value in vars(owner).values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    runner._steer_batch_slot.zero_()


def sleep_and_wake(llm: Any) -> None:
    llm.collective_rpc("sleep", args=(2,))
    llm.collective_rpc("wake_up", args=(["kv_cache"],))
    llm.collective_rpc("wake_up", args=(["weights"],))


@pytest.mark.feature("sleep and wake", "steer", "capture")
def test_tables_survive_sleep_level_2(llm: Any, truth: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches tables, slots of the batch or autoencoders that are lost with the weights' memory.

    Requests would run unsteered, or with readouts of zeros.
    """
    monkeypatch.setattr(CPUWorker, "sleep", discard)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    slots: list[list[int]] = []

    def sleep() -> None:
        slots.append(runner._steer_batch_slot.tolist())
        sleep_and_wake(llm)
        # Steps that continue a batch do not read them again.
        slots.append(runner._steer_batch_slot.tolist())

    got = interrupted(llm, sleep)
    assert any(slots[0]) and slots[1] == slots[0]
    assert same(got, truth)
    for i in range(2):
        close_to(result(got[i]), result(truth[i]), i)
        features_close_to(got[i], truth[i])


def test_comparison_finds_lost_tables(llm: Any, truth: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the comparison above finds the loss."""
    monkeypatch.setattr(CPUWorker, "sleep", discard)
    tables = llm.llm_engine.model_executor.driver_worker.worker.model_runner.steering.tables
    monkeypatch.setattr(type(tables), "restore", lambda self, saved: None)
    kept = tables.save()
    got = interrupted(llm, lambda: sleep_and_wake(llm))
    monkeypatch.undo()
    tables.restore(kept)
    assert not same(got, truth)


@pytest.mark.feature("weight reload", "steer", "capture")
def test_reloaded_weights_keep_their_taps(llm: Any, truth: list[Any], tiny_llama: Path, tmp_path: Path) -> None:
    """Catches taps or tables that a weight reload removes, also from running requests."""
    reload = lambda folder: llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})  # noqa: E731
    got = interrupted(llm, lambda: reload(tiny_llama))
    assert same(got, truth)
    other = save_tiny_llama(tmp_path / "other", initializer_range=0.25)
    model = hf.load(other)
    try:
        reload(other)
        llm.reset_prefix_cache()
        for vector in (VECTOR, None):
            edit = {"post_attn": {LAYER: vector}} if vector is not None else None
            wanted = params(capture=capture(), steering_vectors=edit)
            hf.agrees(run(llm, [prompt(*range(5, 25))], [wanted])[0], model, LAYER, vector)
    finally:
        reload(tiny_llama)
        llm.reset_prefix_cache()
    assert same(run(llm, *workload()), truth)
