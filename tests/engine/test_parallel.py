# SPDX-License-Identifier: Apache-2.0
"""Tests of tensor, pipeline and data parallelism on two CPU ranks against one rank."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.answers import logprobs_of, params, prompt, run, tokens_of
from tests.engine.captures import capture, close_to, result
from tests.engine.conftest import opened
from tests.engine.record_cases import PROMPTS, add, check_consistent, reacting
from tests.engine.steps import chunks_of
from tests.engine.test_mixing import program
from tests.tiny import LAYERS, VOCAB, direction, save_autoencoder
from vllm_steer import Edit, SteeringError, engine_kwargs

CORES = sorted(os.sched_getaffinity(0))[:2]
KINDS = {"tensor": {"tensor_parallel_size": 2}, "pipeline": {"pipeline_parallel_size": 2}}
# Prompts are cut, several steps are in the pipeline, and some requests are preempted.
SMALL = {
    "max_num_batched_tokens": 64, "max_num_seqs": 16, "max_model_len": 128, "block_size": 32,
    "num_gpu_blocks_override": 10,
}  # fmt: skip
LAST_OF_STAGE = LAYERS // 2 - 1

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="vLLM's CPU workers want a core each")


def workload() -> tuple[list[Any], list[Any]]:
    """Return requests with different programs on both pipeline stages, half of them with captures."""
    rng = np.random.default_rng(4)
    prompts = [prompt(*rng.integers(1, VOCAB, int(rng.integers(6, 40))).tolist()) for _ in range(12)]
    border = [
        Edit(kind="ablate", point="post_block", layers=LAST_OF_STAGE, vector=direction(1)),
        Edit(kind="add", point="pre_attn", layers=LAST_OF_STAGE + 1, vector=direction(2)),
    ]
    steering = [None, border, *(program(i) for i in range(2, 12))]
    return prompts, [params(capture=capture() if i % 2 else None, steering=steering[i]) for i in range(12)]


def with_features() -> tuple[list[Any], list[Any]]:
    """Return requests with readouts of an autoencoder and, beside them, of the lens."""
    site = {"point": "post_block", "layer": 2, "positions": "all"}
    readouts = {"topics": {"sae": "tiny", "top_k": 4, **site}, "lens": {"lens": {"top_k": 2}, **site}}
    return [prompt(*each) for each in PROMPTS[:3]], [params(8, readouts=readouts)] * 3


def as_on_one_rank(outputs: list[Any], truth: list[Any]) -> None:
    for i, (got, right) in enumerate(zip(outputs, truth, strict=True)):
        assert tokens_of(got) == tokens_of(right), i
        np.testing.assert_allclose(logprobs_of(got), logprobs_of(right), atol=1e-3, err_msg=str(i))
        if i % 2:
            close_to(result(got), result(right), i)


@contextmanager
def two_ranks(folder: Path, **settings: Any) -> Iterator[Any]:
    """Return a small engine with two workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, CORES)))
        with opened(folder, **SMALL, **settings) as engine:
            yield engine


@pytest.fixture(scope="module")
def steering_config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"saes": {"tiny": str(save_autoencoder(tmp_path_factory.mktemp("sae")))}}


@pytest.fixture(scope="module")
def on_one_rank(tiny_llama: Path, steering_config: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return outputs of the workload, and of requests with features."""
    with opened(tiny_llama, steering_config=steering_config) as llm:
        return run(llm, *workload()), run(llm, *with_features())


@pytest.fixture(scope="module")
def truth(on_one_rank: tuple[list[Any], list[Any]]) -> list[Any]:
    return on_one_rank[0]


@pytest.fixture(scope="module", params=list(KINDS.values()), ids=list(KINDS))
def llm(
    request: pytest.FixtureRequest, truth: list[Any], tiny_llama: Path, steering_config: dict[str, Any]
) -> Iterator[Any]:
    with two_ranks(tiny_llama, **request.param, steering_config=steering_config) as engine:
        yield engine


@pytest.mark.feature("tensor parallel", "steer", "capture")
@pytest.mark.feature("pipeline parallel", "steer", "capture")
def test_matches_one_rank(llm: Any, truth: list[Any]) -> None:
    """Catches an edit that each rank adds, a capture of a partial sum, and wrong layer numbers of a stage."""
    as_on_one_rank(run(llm, *workload()), truth)


def test_delivers_each_row_once(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows that every rank sends, and garbage for layers of another stage."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    sent: list[tuple[int, int]] = []
    original = type(scheduler.steering_row_sender).collect

    def counted(self: Any, output: Any, live: Any) -> None:
        chunks = [chunk for step in getattr(output, "steering_rows", ()) for chunk in chunks_of(step)]
        for chunk in chunks:
            sent.extend((position, code) for position in range(chunk.start, chunk.start + chunk.count)
                        for code in chunk.captures)  # fmt: skip
        original(self, output, live)

    monkeypatch.setattr(type(scheduler.steering_row_sender), "collect", counted)
    found = result(run(llm, [prompt(*range(1, 100))], [params(4, capture=capture())])[0])
    assert len(found.sites) == 3 * LAYERS
    assert len(sent) == len(set(sent)) == 3 * LAYERS * (99 + 3)


def test_workers_run_in_a_large_chunk(llm: Any) -> None:
    """Catches workers whose busy loop began before it was wrapped."""
    assert all("run_loop" in names for names in llm.collective_rpc(_functions_on_stack))


@pytest.mark.feature("dummy batches of data parallel ranks", "steer", "capture")
def test_dummy_batches_change_nothing(llm: Any, truth: list[Any]) -> None:
    """Catches a dummy batch that steers, captures, or leaves its rows to the next real step."""
    engine = llm.llm_engine
    for i, (p, wanted) in enumerate(zip(*workload(), strict=True)):
        engine.add_request(str(i), p, wanted)
    done = {}
    while engine.has_unfinished_requests():
        done.update({int(output.request_id): output for output in engine.step() if output.finished})
        engine.engine_core.engine_core.model_executor.execute_dummy_batch()
    for i, right in enumerate(truth):
        assert tokens_of(done[i]) == tokens_of(right), i
        if i % 2:
            close_to(result(done[i]), result(right), i)


@pytest.mark.feature("tensor parallel", "react")
@pytest.mark.parametrize("llm", [KINDS["tensor"]], ids=["tensor"], indirect=True)
def test_ranks_decide_alike(llm: Any) -> None:
    """Catches ranks whose gates differ, and records that are sent twice or lost."""
    texts = PROMPTS[:3]
    llm.collective_rpc(_clear_state)
    outputs = run(llm, [prompt(*each) for each in texts], [params(16, logprobs=None, **reacting())] * len(texts))
    for output in outputs:
        check_consistent(output.outputs[0], len(output.prompt_token_ids))
    first, second = llm.collective_rpc(_states)
    assert first == second
    assert len(first) == len(texts)


@pytest.mark.feature("tensor parallel", "react")
@pytest.mark.parametrize("llm", [KINDS["tensor"]], ids=["tensor"], indirect=True)
def test_features_and_lens_match_one_rank(llm: Any, on_one_rank: tuple[list[Any], list[Any]]) -> None:
    """Catches a rank without autoencoders that fails, or that skips the lens, which all ranks compute together."""
    for got, right in zip(run(llm, *with_features()), on_one_rank[1], strict=True):
        assert tokens_of(got) == tokens_of(right)
        found, expected = (each.outputs[0].readouts for each in (got, right))
        assert (expected["topics"].values > 0).any()
        np.testing.assert_allclose(found["topics"].values, expected["topics"].values, rtol=1e-3, atol=1e-2)
        np.testing.assert_allclose(found["lens"].logprobs, expected["lens"].logprobs, atol=5e-3)


def _clear_state(worker: Any) -> None:
    worker.model_runner.steering.tables.carry.zero_()


def _functions_on_stack(_: Any) -> list[str]:
    frame: Any = sys._getframe()
    names = []
    while frame:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def _states(worker: Any) -> Any:
    """Return the states of all requests; ranks may give a request different slots."""
    states = worker.model_runner.steering.tables.carry[:, 0].tolist()
    return sorted(each for each in states if any(each))


@pytest.mark.parametrize("llm", [KINDS["tensor"]], ids=["tensor"], indirect=True)
def test_comparison_finds_an_edit_of_partial_sums(llm: Any) -> None:
    """Negative control: a vector added to each rank's partial sum counts twice."""
    p, vector = prompt(*range(5, 15)), direction(1, 1.0)
    once = run(llm, [p], [params(steering=[Edit(kind="add", point="post_attn", layers=1, vector=vector)])])[0]
    try:
        llm.collective_rpc(_add_to_partial_sums, args=(vector,))
        twice = run(llm, [p], [params(skip_reading_prefix_cache=True)])[0]
        llm.collective_rpc(_add_to_partial_sums, args=(vector / 2,))
        halves = run(llm, [p], [params(skip_reading_prefix_cache=True)])[0]
    finally:
        llm.collective_rpc(_add_to_partial_sums, args=(None,))
        llm.reset_prefix_cache()
    assert np.abs(logprobs_of(twice)[0] - logprobs_of(once)[0]).max() > 1e-2
    np.testing.assert_allclose(logprobs_of(halves)[0], logprobs_of(once)[0], atol=1e-3)


def _add_to_partial_sums(worker: Any, vector: Any) -> None:
    import torch

    method = worker.get_model().model.layers[1].self_attn.o_proj.quant_method
    method.__dict__.pop("apply", None)
    if vector is not None:
        original = method.apply
        method.apply = lambda layer, x, bias=None: original(layer, x, bias) + torch.from_numpy(vector)


# Tests of pipelines come last: pytest runs them between the tests of both kinds, so each engine starts once.


@pytest.mark.feature("pipeline parallel", "react")
@pytest.mark.parametrize("llm", [KINDS["pipeline"]], ids=["pipeline"], indirect=True)
def test_readouts_are_refused_across_stages(llm: Any) -> None:
    """Catches a gate whose readout is on another stage, and is never computed."""
    for fields in (reacting(), {"steering": [add(live="calm")]}):
        with pytest.raises(SteeringError, match="pipeline"):
            run(llm, [prompt(*range(5, 15))], [params(2, **fields)])


@pytest.mark.parametrize("llm", [KINDS["pipeline"]], ids=["pipeline"], indirect=True)
def test_rows_of_earlier_stages_need_the_aggregator(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the last stage's output has half of the layers, and the status is partial."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    monkeypatch.setattr(executor, "kv_output_aggregator", None)
    output = run(llm, [prompt(*range(5, 15))], [params(2, capture=capture())])[0]
    found = output.outputs[0].capture_results["memory"]
    assert found.status == "partial"
    assert "pre_attn[0] has 0 of 11 positions" in found.error


@pytest.mark.failure(19)
@pytest.mark.failure(19, control=True)
@pytest.mark.feature("data parallel", "steer", "capture")
async def test_both_data_parallel_engines_steer_and_capture(
    truth: list[Any], tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches captures from engine 0 only.

    Negative control: only one engine answers an RPC.
    """
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, CORES)))
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(tiny_llama), enforce_eager=True, dtype="float32", skip_tokenizer_init=True, seed=0,
            max_logprobs=VOCAB, data_parallel_size=2, **SMALL, **engine_kwargs(),
        )
    )  # fmt: skip

    async def ask(i: int, rank: int) -> Any:
        p, wanted = (each[i] for each in workload())
        async for output in llm.generate(p, wanted, f"{i}-{rank}", data_parallel_rank=rank):
            last = output
        return last

    try:
        alone = await ask(1, 1)  # while engine 0 has never seen a request
        close_to(result(alone), result(truth[1]))
        both = [(i, rank) for i in range(12) for rank in range(2)]
        for (i, _), got in zip(both, await asyncio.gather(*(ask(*each) for each in both)), strict=True):
            assert tokens_of(got) == tokens_of(truth[i]), i
            if i % 2:
                close_to(result(got), result(truth[i]), i)
        assert len(await llm.collective_rpc("steering_capabilities")) == 1
    finally:
        # After the default of a few seconds, vLLM kills each process, and fails if it has just ended by itself
        # (`kill_process_tree` in vllm/utils/system_utils.py).
        llm.shutdown(timeout=60)
