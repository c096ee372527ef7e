# SPDX-License-Identifier: Apache-2.0
"""Tests of KV blocks that return to the device through a connector: never those of other edits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.answers import logprobs_of, params, prompt, run
from tests.engine.captures import capture, close_to, result
from tests.engine.conftest import opened
from tests.engine.offloading import SETTINGS
from tests.tiny import VOCAB, direction
from vllm_steer.engine import scheduler as scheduler_module

BLOCK = 32
PROMPT = prompt(*np.random.default_rng(8).integers(1, VOCAB, 5 * BLOCK + 10).tolist())
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one": {"steering_vectors": {"pre_attn": {1: direction(1)}}},
    "other": {"steering_vectors": {"pre_attn": {1: direction(2)}}},
}


@pytest.fixture(scope="module")
def truth(tiny_llama: Path) -> dict[str, Any]:
    """Return each request's output in an engine without caches."""
    with opened(tiny_llama, enable_prefix_caching=False) as llm:
        wanted = [params(4, **fields, capture=capture()) for fields in FIELDS.values()]
        return dict(zip(FIELDS, run(llm, [PROMPT] * len(FIELDS), wanted), strict=True))


@pytest.fixture(scope="module")
def llm(truth: dict[str, Any], tiny_llama: Path) -> Iterator[Any]:
    with opened(tiny_llama, block_size=BLOCK, num_gpu_blocks_override=24, kv_transfer_config=SETTINGS) as engine:
        yield engine


def ask(llm: Any, name: str, **fields: Any) -> Any:
    """Run one request with an empty device cache, so that blocks come from the store only."""
    assert llm.reset_prefix_cache()
    return run(llm, [PROMPT], [params(4, **FIELDS[name], **fields)])[0]


def check_store(llm: Any, truth: dict[str, Any]) -> None:
    """Run every request twice, the second time from the store, and compare it with an engine without caches."""
    for _ in range(2):
        outputs = {name: ask(llm, name) for name in FIELDS}
        for name, output in outputs.items():
            np.testing.assert_allclose(logprobs_of(output), logprobs_of(truth[name]), atol=1e-3, err_msg=name)
    assert {name: output.num_cached_tokens for name, output in outputs.items()} == dict.fromkeys(FIELDS, 5 * BLOCK)


@pytest.mark.failure(1)
@pytest.mark.feature("KV connectors and offloading", "steer")
def test_store_keys_include_edits(llm: Any, truth: dict[str, Any]) -> None:
    """Catches keys without edits in a connector, and a store that is never used."""
    check_store(llm, truth)


@pytest.mark.feature("KV connectors and offloading", "capture")
def test_capture_of_a_stored_prompt_is_complete(llm: Any, truth: dict[str, Any]) -> None:
    """Catches rows that are missing because their blocks came from the store."""
    for name in FIELDS:
        assert ask(llm, name).num_cached_tokens == 5 * BLOCK
        close_to(result(ask(llm, name, capture=capture())), result(truth[name]), name)


@pytest.mark.failure(1, control=True)
def test_check_finds_a_store_keyed_by_tokens(llm: Any, truth: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: keys without edits give edited KV to a plain request."""
    monkeypatch.setattr(scheduler_module, "steering_hasher", lambda upstream, *rest: upstream)
    with pytest.raises(AssertionError, match="one"):
        check_store(llm, truth)
