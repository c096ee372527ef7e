# SPDX-License-Identifier: Apache-2.0
"""Activation patching over a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.server.server import LAYERS
from vllm_steer import Client
from vllm_steer.patching import PatchingStudy

PROMPTS = {"clean": "the cat sat", "corrupt": "the dog sat", "answer": "ab", "foil": "c"}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def steering(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


@pytest.fixture(scope="module")
def hook_grid(model: Path) -> np.ndarray:
    """Return the difference of answer and foil, patched at `post_block` by hooks in HF Transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    clean, corrupt, answer, foil = (tokenizer.encode(PROMPTS[part]) for part in PROMPTS)
    scored = [(target[:i], token, sign) for target, sign in ((answer, 1), (foil, -1)) for i, token in enumerate(target)]
    grid = np.empty((LAYERS, len(corrupt)))
    with torch.no_grad():
        for layer, position in np.ndindex(grid.shape):
            block, rows = network.model.layers[layer], []
            reader = block.register_forward_hook(lambda *given, rows=rows: rows.append(_stream(given[-1]).clone()))
            network(torch.tensor([clean]))
            reader.remove()

            def patch(*given: Any, row: Any = rows[0][0, position], position: int = position) -> None:
                _stream(given[-1])[0, position] = row

            writer = block.register_forward_hook(patch)
            logprobs = [
                network(torch.tensor([corrupt + before])).logits[0, -1].log_softmax(-1) for before, *_ in scored
            ]
            writer.remove()
            pairs = zip(scored, logprobs, strict=True)
            grid[layer, position] = sum(sign * after[token].item() for (_, token, sign), after in pairs)
    return grid


def _stream(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def test_a_study_over_completions(steering: Client, hook_grid: np.ndarray) -> None:
    """Catches rows, edits or scores that change on the way over HTTP, and a text that is tokenised differently."""
    study = PatchingStudy(steering, **PROMPTS)
    result = study.sweep(points=["post_block"], metric="recovered", progress=False, kl_tokens=20)
    assert not result.failed() and result.info.column_names[4] == "4 d"
    np.testing.assert_allclose(result.grid("post_block", "logit_diff"), hook_grid, atol=TOLERANCE)
    assert np.abs(hook_grid - np.roll(hook_grid, 1, axis=1)).max() > 0.1
    assert result.control("logit_diff") < TOLERANCE
    assert np.isfinite(result.grid("post_block", "kl")).all()
