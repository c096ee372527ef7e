# SPDX-License-Identifier: Apache-2.0
"""Rows of sampled tokens: each beside its own token, log-probability and position."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.lab.hf import Hooked
from tests.server.server import save_model
from tests.tiny import VOCAB
from vllm_steer import SteeringError
from vllm_steer.lab import rollouts

sampled = import_module("vllm_steer.lab.rollouts")  # the package has a function of this name
LAYER, LENGTH, SAMPLES = 2, 7, 2
PROMPTS = [np.random.default_rng(4).integers(0, VOCAB, size).tolist() for size in (5, 2, 9)]
SAMPLING: dict[str, Any] = {"n": SAMPLES, "max_tokens": LENGTH, "temperature": 1.0, "seed": 1, "detokenize": False}


def errors(found: Any, whole: Any, folder: Path, before: bool) -> tuple[float, float]:
    """Return the largest difference of rows and of log-probabilities from a forward pass over whole sequences."""
    hooked, rows, logprobs = Hooked(folder), [], []
    for prompt, sample, position in torch.stack([found.prompts, found.samples, found.positions], 1).tolist():
        written = whole.take((whole.prompts == prompt) & (whole.samples == sample)).token_ids.tolist()
        tokens = PROMPTS[prompt] + written
        rows.append(hooked.run(tokens)[LAYER, position - before])
        logprobs.append(hooked.logits[position - 1].log_softmax(-1)[tokens[position]])
    difference = np.abs(found.rows.numpy() - np.stack(rows)).max() / np.abs(rows).max()
    return float(difference), float((found.logprobs - torch.stack(logprobs)).abs().max())


@pytest.mark.parametrize("before", [False, True])
def test_each_token_has_its_row(llm: Any, folder: Path, before: bool) -> None:
    """Catches rows or log-probabilities of a neighbour, of another sample, and the last token without its decision.

    With rows that are one place off, the same comparison fails.
    """
    whole = rollouts(llm, PROMPTS, layer=LAYER, before=True, **SAMPLING)
    found = whole if before else rollouts(llm, PROMPTS, layer=LAYER, **SAMPLING)
    length = LENGTH if before else LENGTH - 1
    assert found.prompts.tolist() == [number for number in range(3) for _ in range(SAMPLES * length)]
    assert found.samples.tolist() == [sample for _ in range(3) for sample in range(SAMPLES) for _ in range(length)]
    first = torch.tensor([len(prompt) for prompt in PROMPTS])[found.prompts]
    assert (found.positions - first).tolist() == list(range(length)) * SAMPLES * 3
    written = whole.token_ids.reshape(-1, LENGTH)[:, :length]
    assert torch.equal(found.token_ids, written.flatten()) and len(set(map(tuple, written.tolist()))) == 6
    rows, logprobs = errors(found, whole, folder, before)
    assert rows < 1e-4 and logprobs < 1e-4
    shifted = found._replace(rows=found.rows.roll(1, 0), logprobs=found.logprobs.roll(1, 0))
    rows, logprobs = errors(shifted, whole, folder, before)
    assert rows > 1e-2 and logprobs > 1e-2
    rows, _ = errors(found, whole, folder, not before)
    assert rows > 1e-2


def test_one_sampled_token_has_no_row_of_its_own(llm: Any) -> None:
    """Catches a row that belongs to the prompt."""
    found = rollouts(llm, PROMPTS, layer=LAYER, max_tokens=1, detokenize=False)
    assert found.rows.shape == (0, 64) and found.token_ids.shape == (0,)
    assert repr(found) == "Rollouts(0 tokens, rows (0, 64) torch.float32)", "not the numbers of all tokens"


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("long", 4),
        ({"prompt": "long"}, 4),
        ([{"role": "user", "content": "a"}], len("user: a\nassistant:")),
        ({"prompt_token_ids": [1, 2, 3]}, 3),
        ([{"role": "user", "content": [{"type": "image_url"}]}], None),
        ({"multi_modal_data": {}}, None),
    ],
)
def test_lengths_of_texts_and_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: Any, tokens: int | None
) -> None:
    """Catches a text measured in characters of its source, a conversation without its template, and images."""
    save_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for limit in (tokens or 1, (tokens or 1) + 1):
        runner = SimpleNamespace(
            facts=SimpleNamespace(max_model_len=limit, model="m"), tokenizer=tokenizer,
            encode=lambda text, special: tokenizer.encode(text, add_special_tokens=special),
        )  # fmt: skip
        monkeypatch.setattr(sampled, "OfflineRunner", lambda llm, runner=runner: runner)
        refused = pytest.raises(SteeringError, match=rf"prompts\[1\]: has {tokens} tokens, and m reads at most")
        with refused if tokens == limit else nullcontext():
            sampled._check_lengths(None, [{"multi_modal_data": {}}, prompt])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logprobs": 5}, "logprobs: is set by rollouts"),
        ({"capture": {}}, "capture: is set by rollouts"),
        ({"layer": 99}, "layers: 99 is not a layer of .* layers 0 to"),
        ({"layer": [12]}, r"layer: must be one layer such as 12, not \[12\]"),
        ({"prompts": []}, "prompts: is empty; give at least one prompt"),
        ({"prompts": [[1, 2], []]}, r"prompts\[1\]: is empty; give at least one token"),
        ({"prompts": [[1, 2], [3] * 512]}, r"prompts\[1\]: has 512 tokens, and .* at most 511 here; shorten it"),
        ({"prompts": [{"prompt_token_ids": [3] * 600}]}, r"prompts\[0\]: has 600 tokens"),
    ],
)
def test_what_is_refused(llm: Any, changed: dict[str, Any], message: str) -> None:
    """Catches a caller's captures that are replaced in silence."""
    with pytest.raises(SteeringError, match=message):
        rollouts(llm, **{"prompts": PROMPTS, "layer": LAYER, "max_tokens": 2, "detokenize": False, **changed})
