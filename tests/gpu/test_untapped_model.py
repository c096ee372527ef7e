# SPDX-License-Identifier: Apache-2.0
"""GPU: idle steps of the untapped model run exactly stock vLLM's kernels, and outputs equal those of eager steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels import record_in_process
from tests.conformance.model import save
from tests.conformance.zoo import BY_NAME
from tests.gpu.test_engine import agreement, answers, requests
from tests.gpu.test_engine import model as model
from vllm_steer import LLM, SamplingParams

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model whose layers return a single tensor, where the compiler fuses an addition and a norm."""
    settings = {**BY_NAME["granite"].settings, "max_position_embeddings": 4096}
    return str(save(replace(BY_NAME["granite"], settings=settings), tmp_path_factory.mktemp("granite")))


@pytest.mark.feature("plain code for steps without edits and captures", "steer")
def test_idle_step_runs_stock_kernels(granite: str) -> None:
    """Catches additional or split kernels by default. Negative control: without the untapped model there are some."""
    stock = record_in_process("stock", granite, 4)
    assert record_in_process("idle", granite, 4) == stock
    assert record_in_process("idle", granite, 4, plain_code=False) != stock


def test_graphs_of_both_models_equal_eager_steps(model: Path) -> None:
    """Catches a graph of one model replayed instead of the other's, full or piecewise, in mixed batches and alone."""
    prompts, params = requests()
    plain = [SamplingParams(max_tokens=24, temperature=0, logprobs=1, detokenize=False) for _ in params]
    found: list[Any] = []
    for settings in ({"steering_config": {"plain_code": True}}, {"enforce_eager": True}):
        llm = LLM(
            model=str(model), enable_steering=True, dtype="bfloat16", max_model_len=512, skip_tokenizer_init=True,
            gpu_memory_utilization=0.02, kv_cache_memory_bytes=1 << 30, max_num_seqs=64, **settings,
        )  # fmt: skip
        found.append([answers(llm, prompts, each) for each in (params, plain, params)])
        llm.llm_engine.engine_core.shutdown()
        del llm
    for mine, theirs in zip(*found, strict=True):
        assert agreement(mine, theirs, 0.15) >= 0.97
