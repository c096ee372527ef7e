# SPDX-License-Identifier: Apache-2.0
"""GPU: after sleep of level 1 and 2, which frees memory, requests are steered and captured as before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.variants import save_sae
from tests.tiny import direction, save_tiny_llama
from vllm_steer import LLM, SamplingParams

pytestmark = pytest.mark.gpu

HIDDEN, VOCAB = 256, 512
ARENA_ROWS = 1 << 18
FEATURES = {"sae": "random", "top_k": 4, "point": "post_block", "layer": 1, "positions": "all_prompt"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(
        tmp_path_factory.mktemp("tiny"), hidden_size=HIDDEN, intermediate_size=512, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=VOCAB, initializer_range=0.08,
    )  # fmt: skip


@pytest.fixture(scope="module")
def sae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sae(tmp_path_factory.mktemp("sae"), HIDDEN)


@pytest.fixture(scope="module")
def llm(model: Path, sae: Path) -> Iterator[Any]:
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = LLM(
        model=str(model), enable_steering=True, dtype="bfloat16", max_model_len=512, skip_tokenizer_init=True,
        gpu_memory_utilization=0.02, kv_cache_memory_bytes=1 << 30, max_num_seqs=16, enable_sleep_mode=True,
        max_logprobs=VOCAB, steering_config={"capture_rows": ARENA_ROWS, "saes": {"random": str(sae)}},
    )  # fmt: skip
    yield engine
    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()


def requests() -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(1, VOCAB, 40).tolist()} for _ in range(8)]
    hooks = {"memory": {"hooks": {"post_block": "all"}, "positions": "all_prompt"}}
    params = [
        SamplingParams(
            max_tokens=24, temperature=0, ignore_eos=True, detokenize=False, logprobs=VOCAB, capture=hooks,
            readouts={"topics": FEATURES},
            steering_vectors={"post_block": {1: direction(i, 1.0, HIDDEN)}} if i % 2 else None,
        )
        for i in range(8)
    ]  # fmt: skip
    return prompts, params


def first_logprobs(outputs: list[Any]) -> np.ndarray:
    return np.array([[output.outputs[0].logprobs[0][token].logprob for token in range(VOCAB)] for output in outputs])


def sleep_and_wake(llm: Any, model: Path, level: int) -> None:
    llm.sleep(level=level)
    llm.wake_up(["weights"])
    if level == 2:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
    llm.wake_up(["kv_cache"])


def test_vllm_counts_the_tables_before_it_sizes_the_kv_cache(llm: Any) -> None:
    """Catches table memory that vLLM gives to the KV cache. The tiny model's own is a tenth of the arena."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    assert runner.model_memory_usage > ARENA_ROWS * HIDDEN * 2


@pytest.mark.parametrize("level", [1, 2])
def test_requests_after_sleep_are_steered_and_captured_as_before(llm: Any, model: Path, level: int) -> None:
    """Catches tables and autoencoders that are empty or invalid after waking up."""
    before = llm.generate(*requests(), use_tqdm=False)
    sleep_and_wake(llm, model, level)
    after = llm.generate(*requests(), use_tqdm=False)
    np.testing.assert_allclose(first_logprobs(after), first_logprobs(before), atol=0.1)
    for got, right in zip(after, before, strict=True):
        rows, expected = (each.capture_results["memory"] for each in (got, right))
        assert rows.status == "ok", rows.error
        features, known = (each.outputs[0].readouts["topics"].values for each in (got, right))
        assert known.min() > 0
        np.testing.assert_allclose(features, known, rtol=0.1)
        for layer in range(4):
            a, b = (each.tensor("post_block", layer).float() for each in (rows, expected))
            assert float(((a - b).norm(dim=1) / b.norm(dim=1)).max()) < 0.08
    plain, steered = first_logprobs(after[::2]), first_logprobs(after[1::2])
    unsteered = [SamplingParams(max_tokens=1, temperature=0, detokenize=False, logprobs=VOCAB)] * 8
    control = first_logprobs(llm.generate(requests()[0], unsteered, use_tqdm=False))
    assert np.abs(plain - control[::2]).max() < 0.1
    assert np.abs(steered - control[1::2]).max(axis=1).min() > 0.2
