# SPDX-License-Identifier: Apache-2.0
"""Tests of captures beside the prefix cache of a sliding-window model, which keeps only the end of a hit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine import scheduler_harness
from tests.engine.answers import logprobs_of, params, prompt, run
from tests.engine.captures import result
from tests.engine.conftest import opened
from tests.tiny import VOCAB

BLOCK = WINDOW = 32
CONVERSATION = np.random.default_rng(1).integers(1, VOCAB, 200).tolist()


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from transformers import MistralConfig, MistralForCausalLM

    folder = tmp_path_factory.mktemp("windowed")
    torch.manual_seed(0)
    made = MistralConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
        initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None, sliding_window=WINDOW,
    )  # fmt: skip
    MistralForCausalLM(made).float().save_pretrained(folder)
    with opened(folder, block_size=BLOCK, kv_cache_memory_bytes=64 << 20, max_num_seqs=8) as llm:
        yield llm


@pytest.mark.parametrize(("window", "kept"), [(None, 48), (WINDOW, 0)])
def test_resumed_request_computes_its_captured_tokens(tiny_llama: Path, window: int | None, kept: int) -> None:
    """Catches a preempted request that finds its own blocks beyond the first position that it captures.

    With full attention the earlier blocks still serve; with a window they are empty.
    """
    made = scheduler_harness.config(tiny_llama, sequences=4)
    scheduler = scheduler_harness.make(made, blocks=60, window=window)
    tokens = list(range(1, 86))
    scheduler.add_request(scheduler_harness.request("cached", tokens, 1))
    scheduler_harness.finish(scheduler)
    read = {"memory": {"hooks": {"post_block": "all"}, "positions": "all_generated"}}
    resumed = scheduler_harness.request("resumed", tokens[:50], 60, capture=read)
    scheduler.add_request(resumed)
    resumed.append_output_token_ids(tokens[50:])
    plain = scheduler_harness.request("plain", tokens, 1)
    assert scheduler._get_local_prefix_cache_hit(plain)[1] == 80
    blocks, hit, *_ = scheduler._get_local_prefix_cache_hit(resumed)
    assert hit == kept
    assert all(not block.is_null for group in blocks.blocks for block in group)
    assert sum(len(group) for group in blocks.blocks) == kept // scheduler_harness.BLOCK


@pytest.mark.feature("prefix caching", "capture")
def test_capture_within_a_cached_prompt(windowed: Any) -> None:
    """Catches a hit that is cut before the only window that was kept.

    Rows would come from another context, and plain requests would get the same KV.
    """
    whole, reads = prompt(*CONVERSATION), {"memory": {"hooks": {"post_block": [3]}, "positions": [[128, 199]]}}
    truth = run(windowed, [whole], [params(3, capture=reads, skip_reading_prefix_cache=True)])[0]
    windowed.reset_prefix_cache()
    run(windowed, [prompt(*CONVERSATION[:164])], [params(3)])
    # The cache is used by those who read nothing, and by those who read behind it.
    assert run(windowed, [prompt(*CONVERSATION[:170])], [params(1)])[0].num_cached_tokens == 160
    got = run(windowed, [whole], [params(3, capture=reads)])[0]
    after = run(windowed, [whole], [params(3)])[0]
    np.testing.assert_allclose(logprobs_of(got), logprobs_of(truth), atol=1e-3)
    torch.testing.assert_close(
        result(got).tensor("post_block", 3), result(truth).tensor("post_block", 3), atol=2e-3, rtol=1e-3
    )
    assert after.num_cached_tokens > 0
    np.testing.assert_allclose(logprobs_of(after), logprobs_of(truth), atol=1e-3)
