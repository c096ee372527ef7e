# SPDX-License-Identifier: Apache-2.0
"""Edits that take the stream beyond what its dtype holds spoil their own request, and nobody who comes after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine import scheduler_harness
from tests.engine.answers import logprobs_of, params, prompt, run
from tests.engine.conftest import close
from tests.tiny import HIDDEN, VOCAB, make_llm
from vllm_steer.engine.edited_blocks import EditedBlocks

BEYOND = {"post_block": {0: {"vector": np.full(HIDDEN, 3e38, "f4"), "scale": 1e3}}}
FEW: dict[str, Any] = {"block_size": 32, "max_model_len": 64, "max_num_seqs": 4, "num_gpu_blocks_override": 8}
"""So few blocks that each is soon another request's."""


@pytest.fixture(scope="module", params=["whole", "window"])
def crowded(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    folder = tiny_llama
    if request.param == "window":
        from transformers import MistralConfig, MistralForCausalLM

        folder = tmp_path_factory.mktemp("window")
        torch.manual_seed(0)
        made = MistralConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
            initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None, sliding_window=32,
        )  # fmt: skip
        MistralForCausalLM(made).float().save_pretrained(folder)
    llm = make_llm(folder, **FEW)
    yield llm
    close(llm)


def prompts(seed: int, count: int = 3) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [prompt(*rng.integers(1, VOCAB, int(rng.integers(20, 50))).tolist()) for _ in range(count)]


def after_an_overflow(llm: Any) -> tuple[list[Any], list[Any]]:
    """What plain requests get before and after requests whose keys and values are no numbers have had all blocks."""
    llm.reset_prefix_cache()
    first = run(llm, prompts(1), [params()] * 3)
    spoilt = run(llm, prompts(2, 6), [params(steering_vectors=BEYOND)] * 6)
    assert all(not np.isfinite(logprobs_of(each)).any() for each in spoilt)
    llm.reset_prefix_cache()
    return first, run(llm, prompts(1), [params()] * 3)


def test_blocks_of_numbers_are_given_on(crowded: Any) -> None:
    """Catches keys and values that are no numbers in what is left of a block behind another request's tokens."""
    for before, after in zip(*after_an_overflow(crowded), strict=True):
        np.testing.assert_allclose(logprobs_of(after), logprobs_of(before), atol=1e-3)


def test_a_neighbour_in_the_batch(crowded: Any) -> None:
    """Catches an overflow that spreads to other tokens of its step."""
    alone = run(crowded, prompts(1), [params()] * 3)
    crowded.reset_prefix_cache()
    wanted = [params(), params(steering_vectors=BEYOND), params(), params()]
    beside = run(crowded, [*prompts(1)[:1], *prompts(2, 1), *prompts(1)[1:]], wanted)
    for before, after in zip(alone, [beside[0], *beside[2:]], strict=True):
        np.testing.assert_allclose(logprobs_of(after), logprobs_of(before), atol=1e-3)


def test_blocks_that_nobody_zeroes(crowded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: vLLM gives blocks on as they are."""
    monkeypatch.setattr(EditedBlocks, "to_zero", lambda self, new: None)
    _, after = after_an_overflow(crowded)
    assert any(np.isnan(logprobs_of(each)).any() for each in after)


def test_only_blocks_that_were_edited_are_zeroed(tiny_llama: Path) -> None:
    """Catches blocks of a running or a cached request that are zeroed, edited ones that are not, and any others."""
    edit = {"post_block": {1: np.ones(HIDDEN)}}
    scheduler = scheduler_harness.make(scheduler_harness.config(tiny_llama, sequences=4), blocks=9)

    def served(name: str, length: int, **fields: Any) -> tuple[set[int], list[int]]:
        """The blocks that a request had, and those that were zeroed while it ran."""
        scheduler.add_request(scheduler_harness.request(name, list(range(1, length + 1)), 2, **fields))
        given: set[int] = set()
        zeroed: list[int] = []
        while scheduler.has_unfinished_requests():
            scheduled = scheduler.schedule()
            zeroed += scheduled.new_block_ids_to_zero or []
            given.update(*(ids for ids in scheduler.kv_cache_manager.get_block_ids(name)))
            scheduler_harness.finish_step(scheduler, scheduled)
        return given, zeroed

    plain, zeroed = served("plain", 40)
    assert (len(plain), zeroed) == (3, [])
    edited, zeroed = served("edited", 40, steering_vectors=edit)
    assert (len(edited), zeroed) == (3, [])
    again, zeroed = served("again", 40, steering_vectors=edit)
    # Two blocks are the other's, whose keys and values it takes from the cache.
    assert len(again & edited) >= 2
    assert set(zeroed) <= edited
    assert len(zeroed) <= 1
    everything, zeroed = served("everything", 126)
    assert len(everything) == 8
    assert sorted(zeroed) == sorted((edited | again) & everything)
    assert served("more", 126)[1] == []
    # Reading alone leaves numbers.
    read = {"capture": {"memory": {"hooks": {"post_block": [1]}}}}
    assert served("read", 126, **read)[1] == served("last", 126)[1] == []
