# SPDX-License-Identifier: Apache-2.0
"""Tests of preemption, chunked prefill, admission and aborts of steered requests."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.answers import chosen_logprobs, finish, logprobs_of, params, prompt, run, tokens_of
from tests.engine.captures import capture
from tests.engine.conftest import close, opened
from tests.engine.crowded import crowded_engine
from tests.engine.test_mixing import program
from tests.tiny import VOCAB, direction, make_llm
from vllm_steer import SteeringError

REQUESTS, GENERATED = 12, 32


def workload() -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(11)
    prompts = [prompt(*rng.integers(1, VOCAB, int(rng.integers(20, 60))).tolist()) for _ in range(REQUESTS)]
    wanted = [params(GENERATED, logprobs=1, steering=program(i) if i % 4 else None) for i in range(REQUESTS)]
    return prompts, wanted


@pytest.fixture(scope="module")
def truth(tiny_llama: Path) -> list[Any]:
    """Return the output of each request alone in an eager engine without caches."""
    with opened(tiny_llama, enable_prefix_caching=False, max_num_seqs=1) as llm:
        prompts, wanted = workload()
        outputs = [run(llm, [p], [w])[0] for p, w in zip(prompts, wanted, strict=True)]
    return outputs


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def compare(outputs: list[Any], truth: list[Any]) -> None:
    for i, (got, right) in enumerate(zip(outputs, truth, strict=True)):
        assert tokens_of(got) == tokens_of(right), i
        np.testing.assert_allclose(chosen_logprobs(got), chosen_logprobs(right), atol=1e-3, err_msg=str(i))


@pytest.mark.failure(9)
@pytest.mark.feature("preemption", "steer")
def test_preemption_in_decode(tiny_llama: Path, truth: list[Any]) -> None:
    """Catches recomputed tokens that take the prompt's row. 12 requests share 8 cache blocks."""
    with crowded_engine(tiny_llama, enable_prefix_caching=False) as (llm, preempted):
        compare(run(llm, *workload()), truth)
        assert any(request.num_output_tokens > 0 for request in preempted), "no request was preempted in decode"
        assert scheduler_of(llm).steering_allocator.in_use == (0, 0, 0, 0)


@pytest.mark.failure(8)
@pytest.mark.feature("chunked prefill", "steer")
@pytest.mark.feature("waiting for a place in the tables", "steer")
@pytest.mark.parametrize("chunk", [0, 1])
def test_chunked_prefill_with_three_rows(tiny_llama: Path, truth: list[Any], chunk: int) -> None:
    """Catches a selector boundary that moves with a chunk, and requests that are dropped instead of queued.

    ``chunk``: most tokens of one prompt in a step; 0 for no limit.
    """
    with opened(
        tiny_llama, max_num_batched_tokens=16, max_num_seqs=8, max_model_len=128, block_size=32,
        long_prefill_token_threshold=chunk,
        steering_config={"max_rows": 3, "max_vectors": 3, "max_instructions": 9, "max_segments": 8},
    ) as llm:  # fmt: skip
        most = []
        allocator = scheduler_of(llm).steering_allocator
        acquire = allocator.acquire
        allocator.acquire = lambda rows: (acquire(rows), most.append(allocator.in_use[0]))[0]
        compare(run(llm, *workload()), truth)
        assert max(most) <= 3
        assert allocator.in_use == (0, 0, 0, 0)


@pytest.mark.feature("waiting for a place in the tables", "steer")
def test_one_row_serves_all_requests_in_turn(tiny_llama: Path) -> None:
    """Catches a request that is dropped, unsteered or never admitted if only one can be steered at a time."""
    sizes = {"max_rows": 1, "max_vectors": 1, "max_instructions": 1, "max_segments": 1}
    p = prompt(*range(5, 12))
    wanted = [params(4, steering_vectors={"post_block": {1: direction(i)}}) if i % 3 else params(4) for i in range(9)]
    with opened(tiny_llama, steering_config=sizes) as llm:
        together = run(llm, [p] * 9, wanted)
        for got, each in zip(together, wanted, strict=True):
            alone = run(llm, [p], [each])[0]
            np.testing.assert_allclose(logprobs_of(got), logprobs_of(alone), atol=1e-4)
        assert np.abs(logprobs_of(together[1]) - logprobs_of(together[2])).max() > 1e-2
        assert scheduler_of(llm).steering_allocator.in_use == (0, 0, 0, 0)
        two_rows = {"prefill_steering_vectors": {"post_block": {1: direction(1)}}}
        two_rows["decode_steering_vectors"] = {"post_block": {1: direction(2)}}
        with pytest.raises(SteeringError, match="more than 1 token segments"):
            run(llm, [p], [params(4, **two_rows)])


@pytest.mark.feature("waiting for a place in the tables", "steer")
def test_only_the_waiting_request_times_out(tiny_llama: Path) -> None:
    """Catches a request that waits forever or runs unsteered, and a timeout of others."""
    p = prompt(*range(5, 12))
    site = {"post_block": {1: direction(1)}}
    with opened(tiny_llama, steering_config={"max_rows": 1, "queue_timeout": 60}) as llm:
        alone = run(llm, [p], [params(40, steering_vectors=site)])[0]
        engine, admission = llm.llm_engine, scheduler_of(llm).steering_admission
        clock = [0.0]
        admission._now = lambda: clock[0]
        engine.add_request("runs", p, params(40, steering_vectors=site))
        other = {"steering_vectors": {"post_block": {1: direction(2)}}, "capture": capture()}
        engine.add_request("waits", p, params(4, **other))
        engine.add_request("plain", p, params(4))
        done, captured = {}, {}
        for number in range(60):
            clock[0] += 10 if number > 5 else 0
            ended = [output for output in engine.step() if output.finished]
            done.update({output.request_id: output.outputs[0] for output in ended})
            captured.update({output.request_id: output.capture_results for output in ended})
        assert not engine.has_unfinished_requests()
        rows = captured["waits"]["memory"]
        assert rows.status == "partial" and "--steering-queue-timeout" in rows.error
        assert done["waits"].finish_reason == "error"
        assert "--steering-queue-timeout" in done["waits"].stop_reason
        assert list(done["waits"].token_ids) == []
        assert done["plain"].finish_reason == "length"
        assert list(done["runs"].token_ids) == tokens_of(alone)
        assert scheduler_of(llm).steering_allocator.in_use == (0, 0, 0, 0)


@pytest.mark.feature("aborts", "steer")
def test_aborted_requests_release_their_room(tiny_llama: Path) -> None:
    """Catches room that leaks on abort, for waiting and for running requests."""
    with opened(tiny_llama, max_num_seqs=2, steering_config={"max_rows": 2}) as llm:
        engine = llm.llm_engine
        for i in range(6):
            engine.add_request(
                str(i), prompt(*range(1, 20)), params(50, steering_vectors={"post_block": {1: direction(i)}})
            )
        for _ in range(3):
            engine.step()
        allocator = scheduler_of(llm).steering_allocator
        assert allocator.in_use[0] == 2
        engine.abort_request([str(i) for i in range(6)])
        finish(engine)
        assert allocator.in_use == (0, 0, 0, 0)
        run(llm, [prompt(1, 2, 3)], [params(2)])
        assert llm.llm_engine.model_executor.driver_worker.worker.model_runner.steering.store.num_with_program == 0


def test_a_closed_engine_is_freed(tiny_llama: Path) -> None:
    """Catches a model that stays in memory after its engine, by a reference of ours or of these tests."""
    llm = make_llm(tiny_llama, max_num_seqs=1)
    run(llm, [prompt(1, 2, 3)], [params(2, capture=capture(), steering_vectors={"pre_attn": {2: direction(3)}})])
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    model, steering = weakref.ref(worker.model_runner.get_model()), weakref.ref(worker.model_runner.steering)
    del worker
    close(llm)  # while the name still refers to it
    gc.collect()
    assert (model(), steering()) == (None, None)
