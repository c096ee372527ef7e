# SPDX-License-Identifier: Apache-2.0
"""Prefix-cache keys of models whose last layer caches what it computes behind attention (Inkling's convolutions)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.conformance.engine import steered_engine
from tests.conformance.model import HIDDEN, LAYERS, VOCAB
from tests.conformance.no_reference import NO_REFERENCE, random_weights, save_config
from tests.conformance.shard import EVERYTHING, selected

INKLING = next(tiny for tiny in NO_REFERENCE if tiny.name == "inkling")
pytestmark = pytest.mark.skipif(not (EVERYTHING or selected("inkling")), reason="belongs to another part")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("cached")
    path = save_config(INKLING, folder)
    with random_weights(INKLING) as settings:
        engine = {**(INKLING.engine or {}), **settings, "enable_prefix_caching": True, "block_size": 32}
        with steered_engine(dataclasses.replace(INKLING, engine=engine), path, "eager") as started:
            yield started


def ask(llm: Any, prompt: list[int], **fields: Any) -> Any:
    from vllm_steer import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, logprobs=-1, **fields)
    return llm.generate([{"prompt_token_ids": prompt}], [params], use_tqdm=False)[0]


def distance(one: Any, other: Any) -> float:
    rows = [[out.outputs[0].logprobs[0][token].logprob for token in range(VOCAB)] for out in (one, other)]
    return float(np.abs(np.subtract(*rows)).max())


@pytest.mark.parametrize("forked", [True, False], ids=["keys", "without"])
def test_an_edit_behind_the_last_attention_reaches_no_other_request(
    llm: Any, forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a plain request that reads convolved outputs of an edited one; other models' keys are the control."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert scheduler._caches_behind_attention
    if not forked:
        monkeypatch.setattr(scheduler, "_caches_behind_attention", False)
    prompt = np.random.default_rng(forked).integers(3, VOCAB, 40).tolist()
    vector = 100 * np.random.default_rng(7).standard_normal(HIDDEN).astype(np.float32)
    ask(llm, prompt, steering_vectors={"post_attn": {LAYERS - 1: vector}})
    after, again = ask(llm, prompt), ask(llm, prompt)
    truth = ask(llm, prompt, skip_reading_prefix_cache=True)
    assert again.num_cached_tokens > 0
    assert (distance(after, truth) < 1e-4) is forked
