# SPDX-License-Identifier: Apache-2.0
"""Tests of the prefix cache with steered requests in the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.answers import logprobs_of, params, prompt, run
from tests.tiny import direction
from vllm_steer.engine import scheduler as scheduler_module

SITE = {"pre_attn": {1: direction(21)}}


def fresh_prompt(seed: int) -> Any:
    return prompt(*np.random.default_rng(seed).integers(1, 128, 400).tolist())


def cached(llm: Any, p: Any, **fields: Any) -> int:
    return int(run(llm, [p], [params(max_tokens=2, **fields)])[0].num_cached_tokens)


@pytest.mark.failure(1)
@pytest.mark.feature("prefix caching", "steer")
def test_steered_and_plain_requests_share_no_blocks(llm: Any) -> None:
    """Catches steered KV served to a plain request through the prefix cache, and the reverse."""
    p = fresh_prompt(1)
    run(llm, [p], [params(steering_vectors=SITE)])
    after = run(llm, [p], [params()])[0]
    truth = run(llm, [p], [params(skip_reading_prefix_cache=True)])[0]
    np.testing.assert_allclose(logprobs_of(after), logprobs_of(truth), atol=1e-4)

    q = fresh_prompt(2)
    run(llm, [q], [params()])
    after = run(llm, [q], [params(steering_vectors=SITE)])[0]
    truth = run(llm, [q], [params(steering_vectors=SITE, skip_reading_prefix_cache=True)])[0]
    np.testing.assert_allclose(logprobs_of(after), logprobs_of(truth), atol=1e-4)


@pytest.mark.failure(1)
def test_vllm_keys_alone_leak(llm: Any, monkeypatch: Any) -> None:
    """Negative control: with vLLM's own keys, the comparison above finds steered KV in a plain request."""
    monkeypatch.setattr(scheduler_module, "steering_hasher", lambda upstream, *rest: upstream)
    p = fresh_prompt(3)
    run(llm, [p], [params(steering_vectors=SITE)])
    after = run(llm, [p], [params()])[0]
    truth = run(llm, [p], [params(skip_reading_prefix_cache=True)])[0]
    assert after.num_cached_tokens > 0
    assert np.abs(logprobs_of(after) - logprobs_of(truth)).max() > 1e-2


@pytest.mark.feature("prefix caching", "steer")
def test_shares_blocks_of_equal_edits(llm: Any) -> None:
    """Catches needless misses: equal edits share blocks, and edits of generated tokens share the prompt."""
    p = fresh_prompt(4)
    assert cached(llm, p) == 0
    whole = cached(llm, p)
    assert whole > 0
    assert cached(llm, p, decode_steering_vectors=SITE) == whole
    assert cached(llm, p, steering_vectors=SITE) == 0
    assert cached(llm, p, steering_vectors=SITE) == whole
    assert cached(llm, p, steering_vectors={"pre_attn": {1: direction(22)}}) == 0
    assert cached(llm, p, steering_vectors={"post_block": {3: direction(22)}}) == whole
