# SPDX-License-Identifier: Apache-2.0
"""GPU: edits that overflow the stream's dtype affect their own request and no later one.

On CPU, blocks of edited requests are zeroed before reuse (``engine/edited_blocks.py``). On a GPU they are not, since
its attention kernels must ignore whatever lies in a block after a sequence's end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.engine.answers import chosen_logprobs, params, run
from tests.engine.conftest import close
from tests.engine.test_overflow import beyond, prompts, unchecked
from tests.tiny import BF16_MODEL, save_tiny_llama
from vllm_steer import LLM

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[None, "TRITON_ATTN"])
def crowded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return an engine whose few blocks are soon reused, with vLLM's default attention backend and with Triton's."""
    # With fewer than 1,024 tokens, runner V2's sampler may return an invalid token for NaN logits
    # (v1/worker/gpu/sample/gumbel.py).
    llm = LLM(
        model=str(save_tiny_llama(tmp_path_factory.mktemp("tiny"), **{**BF16_MODEL, "vocab_size": 2048})),
        enable_steering=True, dtype="bfloat16", max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=12,
        skip_tokenizer_init=True, gpu_memory_utilization=0.02, kv_cache_memory_bytes=1 << 28,
        attention_config={} if request.param is None else {"backend": request.param},
    )  # fmt: skip
    yield llm
    close(llm)


def test_reused_blocks_hold_finite_values(crowded: Any) -> None:
    """Catches NaN or infinite keys and values in the unused part of a block after another request's tokens."""
    plain = [params(logprobs=1)] * 3
    crowded.reset_prefix_cache()
    first = run(crowded, prompts(1), plain)
    with unchecked():
        spoilt = run(crowded, prompts(2, 6), [params(logprobs=1, **beyond(BF16_MODEL["hidden_size"]))] * 6)
    assert all(not np.isfinite(chosen_logprobs(each)).any() for each in spoilt)
    crowded.reset_prefix_cache()
    for before, after in zip(first, run(crowded, prompts(1), plain), strict=True):
        np.testing.assert_allclose(chosen_logprobs(after)[0], chosen_logprobs(before)[0], atol=0.05)
        assert np.isfinite(chosen_logprobs(after)).all()
