# SPDX-License-Identifier: Apache-2.0
"""GPU: captured rows under runner V2 with CUDA graphs and async scheduling equal HF's hidden states."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.runner import V2, runner_of
from tests.tiny import BF16_BOUND, BF16_MODEL, LAYERS, save_tiny_llama
from vllm_steer import LLM, SamplingParams

pytestmark = pytest.mark.gpu

VOCAB = BF16_MODEL["vocab_size"]
CAPTURE = {"memory": {"hooks": {"post_block": "all", "pre_attn": [0]}, "positions": "all"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), **BF16_MODEL)


@pytest.fixture(scope="module", params=[False, True], ids=["graphs", "eager"])
def outputs(request: pytest.FixtureRequest, model: Path) -> Iterator[list[Any]]:
    """Return outputs of 40 requests, every second one captured, with a cache so small that some are preempted."""
    llm = LLM(
        model=str(model), enable_steering=True, dtype="bfloat16", max_model_len=256, skip_tokenizer_init=True,
        gpu_memory_utilization=0.02, kv_cache_memory_bytes=1 << 30, max_num_seqs=32, enforce_eager=request.param,
        num_gpu_blocks_override=96, max_num_batched_tokens=256,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(1, VOCAB, int(rng.integers(3, 120))).tolist()} for _ in range(40)]
    params = [
        SamplingParams(
            max_tokens=int(rng.integers(4, 60)), temperature=0, ignore_eos=True, detokenize=False,
            capture=CAPTURE if i % 2 else None,
        )
        for i in range(40)
    ]  # fmt: skip
    assert runner_of(llm) == V2
    yield llm.generate(prompts, params, use_tqdm=False)
    del llm
    gc.collect()
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


@pytest.mark.feature("CUDA graphs, both runners, async scheduling (GPU)", "capture")
def test_rows_equal_hf_hidden_states(outputs: list[Any], model: Path) -> None:
    """Catches a row of another token, layer or step, and a row overwritten by the next step."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda()
    for output in outputs[1::2]:
        found = output.capture_results["memory"]
        assert found.status == "ok", found.error
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        with torch.inference_mode():
            states = reference(torch.tensor([tokens], device="cuda"), output_hidden_states=True).hidden_states
        for layer in range(LAYERS - 1):
            rows = found.tensor("post_block", layer)
            assert found.positions("post_block", layer).tolist() == list(range(len(tokens)))
            right = states[layer + 1][0].float().cpu()
            off = (rows.float() - right).norm(dim=1) / right.norm(dim=1)
            assert off.max() < BF16_BOUND, (output.request_id, layer, float(off.max()))
        torch.testing.assert_close(
            found.tensor("pre_attn", 0).float(), states[0][0].float().cpu(), atol=1e-3, rtol=1e-2
        )


def test_plain_requests_have_no_results(outputs: list[Any]) -> None:
    """Catches capture results of plain requests."""
    assert all(output.capture_results is None for output in outputs[::2])
