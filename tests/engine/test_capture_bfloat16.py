# SPDX-License-Identifier: Apache-2.0
"""Captured rows of a bfloat16 model against HF Transformers, within a bound that separates neighbouring rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.answers import params, prompt, run, tokens_of
from tests.engine.captures import capture, result
from tests.engine.conftest import close
from tests.tiny import BF16_BOUND, BF16_MODEL, LAYERS, make_llm, save_tiny_llama

POINTS = ("pre_attn", "post_attn", "post_block")
Streams = dict[tuple[str, int], torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("bfloat16"), **BF16_MODEL)


@pytest.fixture(scope="module")
def captured(model: Path) -> Iterator[list[tuple[Any, list[int]]]]:
    """Return each request's capture result and its forwarded tokens."""
    llm = make_llm(model, dtype="bfloat16", max_num_batched_tokens=64, max_num_seqs=8)
    rng = np.random.default_rng(0)
    prompts = [prompt(*rng.integers(1, BF16_MODEL["vocab_size"], n).tolist()) for n in (5, 90, 33, 60)]
    outputs = run(llm, prompts, [params(12, logprobs=None, capture=capture())] * 4)
    found = [
        (result(output), [*each["prompt_token_ids"], *tokens_of(output)][:-1])
        for output, each in zip(outputs, prompts, strict=True)
    ]
    yield found
    close(llm)


@pytest.fixture(scope="module")
def streams(model: Path, captured: list[tuple[Any, list[int]]]) -> list[Streams]:
    """Return HF's bfloat16 stream at every point and layer, ``[tokens, hidden]``."""
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    seen: Streams = {}
    for number, layer in enumerate(reference.model.layers):
        layer.register_forward_hook(
            lambda _, given, out, number=number: seen.update(
                {("pre_attn", number): given[0][0], ("post_block", number): (out[0] if isinstance(out, tuple) else out)}
            )
        )
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda _, given, number=number: seen.update({("post_attn", number): given[0][0]})
        )
    all_streams = []
    for _, tokens in captured:
        with torch.inference_mode():
            reference(torch.tensor([tokens]), use_cache=False)
        all_streams.append({site: rows.reshape(len(tokens), -1).float() for site, rows in seen.items()})
    return all_streams


def distance(rows: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the relative distance of each row from the expected one, ``[tokens]``."""
    return (rows.float() - right).norm(dim=1) / right.norm(dim=1)


def test_rows_match_hf_within_the_bound(captured: list[tuple[Any, list[int]]], streams: list[Streams]) -> None:
    """Catches a row of another token, layer or point, and rows that were rounded twice."""
    worst = 0.0
    for (rows, tokens), right in zip(captured, streams, strict=True):
        assert len(rows.sites) == len(POINTS) * LAYERS
        for site in rows.sites:
            assert rows.tensor(*site).dtype == torch.bfloat16
            assert rows.positions(*site).tolist() == list(range(len(tokens)))
            worst = max(worst, float(distance(rows.tensor(*site), right[site]).max()))
    assert worst < BF16_BOUND, worst


def test_neighbouring_rows_exceed_the_bound(captured: list[tuple[Any, list[int]]], streams: list[Streams]) -> None:
    """Negative control: rows of the next token, point and layer are outside of the bound."""
    for (rows, _), right in zip(captured, streams, strict=True):
        for point, layer in rows.sites:
            found = rows.tensor(point, layer)
            others = [right[other, layer] for other in POINTS if other != point]
            others += [right[point, other] for other in range(LAYERS) if other != layer]
            assert min(float(distance(found, other).median()) for other in others) > 2 * BF16_BOUND
            assert float(distance(found[1:], right[point, layer][:-1]).min()) > 2 * BF16_BOUND
