# SPDX-License-Identifier: Apache-2.0
"""Tests of the faults of vLLM's CPU build that engines with steering repair."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.lora.request import LoRARequest

from tests.adapters import save_adapter
from tests.engine.answers import logprobs_of, params, prompt, run, tokens_of
from tests.engine.conftest import opened
from tests.tiny import HIDDEN, LAYERS, VOCAB, direction

STEP = 64


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[Any]:
    """Return an engine with one slot for adapters, which is also the last."""
    with opened(tiny_llama, enable_lora=True, max_loras=1, max_lora_rank=8, max_num_seqs=8,
                      max_num_batched_tokens=STEP, enable_prefix_caching=False) as engine:  # fmt: skip
        yield engine


@pytest.mark.feature("seeded sampling", "steer")
@pytest.mark.parametrize("edit", [None, {"post_block": {1: direction(1)}}])
def test_a_seeded_prompt_may_take_several_steps(llm: Any, edit: Any) -> None:
    """Catches (1) an engine that stops at a split prompt, alone or beside others, and (2) a draw for each part."""
    random = np.random.default_rng(3)
    p = prompt(*random.integers(1, VOCAB, 40).tolist())
    seeded = params(8, temperature=1.0, seed=5, logprobs=None, steering_vectors=edit)
    others = [prompt(*random.integers(1, VOCAB, 50).tolist()) for _ in range(3)]
    whole = tokens_of(run(llm, [p], [seeded])[0])
    assert tokens_of(run(llm, [*others, p], [params(8)] * 3 + [seeded])[3]) == whole
    longer = prompt(*random.integers(1, VOCAB, 3 * STEP).tolist())
    alone, beside = run(llm, [longer], [seeded])[0], run(llm, [*others, longer], [params(8)] * 3 + [seeded])[3]
    assert tokens_of(alone) == tokens_of(beside) != whole


@pytest.mark.feature("LoRA", "steer")
def test_requests_without_an_adapter_do_not_get_one(llm: Any, tmp_path: Path) -> None:
    """Catches the adapter of the last slot in requests without one, beside requests with it and on their own."""
    widths = {"self_attn.q_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (HIDDEN, 128), "mlp.down_proj": (128, HIDDEN)}
    adapter = LoRARequest("first", 1, str(save_adapter(tmp_path / "a", 0, widths, 8, 16, layers=LAYERS, scale=0.3)))
    p = prompt(*range(10, 30))
    before = run(llm, [p], [params()])[0]
    batch = llm.generate([p] * 3, [params()] * 3, lora_request=[None, adapter, None], use_tqdm=False)
    after = run(llm, [p], [params()])[0]
    for plain in (batch[0], batch[2], after):
        np.testing.assert_allclose(logprobs_of(plain), logprobs_of(before), atol=1e-3)
    assert np.abs(logprobs_of(batch[1])[0] - logprobs_of(before)[0]).max() > 0.1
