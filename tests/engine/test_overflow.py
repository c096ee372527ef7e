# SPDX-License-Identifier: Apache-2.0
"""Edits that overflow the stream's dtype affect their own request and no later one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.engine import scheduler_harness
from tests.engine.answers import logprobs_of, params, prompt, run
from tests.engine.conftest import opened
from tests.tiny import HIDDEN, VOCAB
from vllm_steer import SteeringError
from vllm_steer.engine.edited_blocks import EditedBlocks


def beyond(width: int = HIDDEN) -> dict[str, Any]:
    """Return edits that together make a row infinite; requests with them are made :func:`unchecked`."""
    edit = {"kind": "add_normed", "point": "post_block", "layers": 0, "vector": np.ones(width), "strength": 1.0}
    return {"steering": [edit] * 160}


def unchecked() -> Any:
    """Return a context in which edits that overflow are not refused, as if the model's own rows did."""
    return patch("vllm_steer.engine.capabilities.check_overflow")


FEW: dict[str, Any] = {"block_size": 32, "max_model_len": 64, "max_num_seqs": 4, "num_gpu_blocks_override": 8}
"""So few blocks that each is soon reused by another request."""


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
    with opened(folder, **FEW) as llm:
        yield llm


def prompts(seed: int, count: int = 3) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [prompt(*rng.integers(1, VOCAB, int(rng.integers(20, 50))).tolist()) for _ in range(count)]


def outputs_around_overflow(llm: Any) -> tuple[list[Any], list[Any]]:
    """Return outputs of plain requests before and after requests with non-finite keys and values used all blocks."""
    llm.reset_prefix_cache()
    first = run(llm, prompts(1), [params()] * 3)
    with unchecked():
        spoilt = run(llm, prompts(2, 6), [params(**beyond())] * 6)
    assert all(not np.isfinite(logprobs_of(each)).any() for each in spoilt)
    llm.reset_prefix_cache()
    return first, run(llm, prompts(1), [params()] * 3)


def test_reused_blocks_hold_finite_values(crowded: Any) -> None:
    """Catches non-finite keys and values in the unused part of another request's block."""
    for before, after in zip(*outputs_around_overflow(crowded), strict=True):
        np.testing.assert_allclose(logprobs_of(after), logprobs_of(before), atol=1e-3)


@pytest.mark.parametrize("size", [1e19, 1e38])
def test_vectors_with_infinite_squares(crowded: Any, size: float) -> None:
    """Catches a finite vector that makes every row zero or NaN in the next norm, after which each token is 0."""
    with pytest.raises(SteeringError, match=r"^steering_vectors\.post_block\[0\]: add .* use a smaller strength"):
        run(crowded, prompts(1, 1), [params(steering_vectors={"post_block": {0: np.full(HIDDEN, size)}})])


def test_neighbours_in_the_batch_are_unaffected(crowded: Any) -> None:
    """Catches an overflow that spreads to other tokens of its step."""
    alone = run(crowded, prompts(1), [params()] * 3)
    crowded.reset_prefix_cache()
    wanted = [params(), params(**beyond()), params(), params()]
    with unchecked():
        beside = run(crowded, [*prompts(1)[:1], *prompts(2, 1), *prompts(1)[1:]], wanted)
    for before, after in zip(alone, [beside[0], *beside[2:]], strict=True):
        np.testing.assert_allclose(logprobs_of(after), logprobs_of(before), atol=1e-3)


def test_without_zeroing_later_requests_are_affected(crowded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: vLLM reuses blocks without zeroing them."""
    monkeypatch.setattr(EditedBlocks, "take_reused", lambda self, new: None)
    _, after = outputs_around_overflow(crowded)
    assert any(np.isnan(logprobs_of(each)).any() for each in after)


def test_only_edited_blocks_are_zeroed(tiny_llama: Path) -> None:
    """Catches zeroed blocks of running or cached requests, and edited blocks that are not zeroed."""
    edit = {"post_block": {1: np.ones(HIDDEN)}}
    scheduler = scheduler_harness.make(scheduler_harness.config(tiny_llama, sequences=4), blocks=9)

    def run_and_track_blocks(name: str, length: int, **fields: Any) -> tuple[set[int], list[int]]:
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

    plain, zeroed = run_and_track_blocks("plain", 40)
    assert (len(plain), zeroed) == (3, [])
    edited, zeroed = run_and_track_blocks("edited", 40, steering_vectors=edit)
    assert (len(edited), zeroed) == (3, [])
    again, zeroed = run_and_track_blocks("again", 40, steering_vectors=edit)
    # Two blocks are cached blocks of the other request.
    assert len(again & edited) >= 2
    assert set(zeroed) <= edited
    assert len(zeroed) <= 1
    everything, zeroed = run_and_track_blocks("everything", 126)
    assert len(everything) == 8
    assert sorted(zeroed) == sorted((edited | again) & everything)
    assert run_and_track_blocks("more", 126)[1] == []
    # Captures leave finite values.
    read = {"capture": {"memory": {"hooks": {"post_block": [1]}}}}
    assert run_and_track_blocks("read", 126, **read)[1] == run_and_track_blocks("last", 126)[1] == []
