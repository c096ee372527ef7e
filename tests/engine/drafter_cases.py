# SPDX-License-Identifier: Apache-2.0
"""Cases of speculative decoding with draft models: only the target is steered and captured.

An EAGLE head sees the target's steered stream, but the target decides. Every method gives the output of the same
request without speculation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine import drafts
from tests.engine.answers import params, prompt, run, tokens_of
from tests.engine.captures import capture, close_to, result
from tests.engine.conftest import opened
from tests.engine.record_cases import PROMPTS as ALL_PROMPTS
from tests.engine.test_mixing import program
from tests.tiny import HIDDEN, LAYERS, VOCAB

SMALL = {"max_model_len": 128, "max_num_seqs": 16}
NUM_DRAFTS = 3
PROMPTS = ALL_PROMPTS[1::2]


def workload() -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(5)
    prompts = [prompt(*rng.integers(1, VOCAB, int(rng.integers(6, 40))).tolist()) for _ in range(8)]
    wanted = [
        params(20, logprobs=None, steering=program(i) if i % 4 else None, capture=capture() if i % 2 else None)
        for i in range(8)
    ]
    return prompts, wanted


def save_draft_model(target: Path, folder: Path) -> Path:
    """Save the target with noisy weights, whose drafts are often right and often wrong."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    weights = load_file(target / "model.safetensors")
    noisy = {
        name: weight + 0.03 * weight.std() * torch.randn(weight.shape, generator=generator)
        if weight.ndim > 1
        else weight
        for name, weight in weights.items()
    }
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((target / "config.json").read_text())
    return folder


def save_eagle_head(target: Path, folder: Path) -> Path:
    """Save one random decoder layer on the target's last stream, with the target's embedding and output."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    weights = load_file(target / "model.safetensors")
    head = {
        name.removeprefix("model."): weight.clone()
        for name, weight in weights.items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    head["fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.2
    save_file(head, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return folder


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> tuple[list[Any], list[Any]]:
    """Return outputs of an engine without drafts: of the workload, and of requests with lens readouts."""
    with opened(tiny_llama, **SMALL) as llm:
        return run(llm, *workload()), drafts.run_lens(llm, PROMPTS)


SAVE = {"draft_model": save_draft_model, "eagle": save_eagle_head}


@pytest.fixture(scope="module")
def decided(tiny_llama: Path) -> drafts.Truth:
    """Return gates and stops, and what a reference without drafts does."""
    return (*drafts.truth_of(tiny_llama, PROMPTS), PROMPTS)


@pytest.mark.parametrize("method", list(SAVE))
def test_matches_decoding_without_speculation(
    plain: tuple[list[Any], list[Any]], decided: drafts.Truth, tiny_llama: Path, tmp_path: Path, method: str
) -> None:
    """Catches captures, gates and stops of rejected drafts, and a steered drafter of the target's class."""
    drafter = SAVE[method](tiny_llama, tmp_path / method)
    speculative = {"method": method, "model": str(drafter), "num_speculative_tokens": NUM_DRAFTS}
    with opened(tiny_llama, **SMALL, speculative_config=speculative) as llm:
        check_taps(llm)
        check_outputs(llm, workload(), plain[0], accepts=method != "eagle")
        if method == "draft_model":
            drafts.check_every_window(llm, decided)
            drafts.check_controls(llm, decided)
            drafts.check_live(llm, tiny_llama)
            drafts.check_lens(drafts.run_lens(llm, PROMPTS), plain[1])


def check_taps(llm: Any) -> None:
    """Raise unless all layers of the target have taps, and no module of the drafter."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    assert _hooked(runner.get_model()) == LAYERS
    assert _hooked(runner.drafter.model) == 0


def check_outputs(
    llm: Any, requests: tuple[list[Any], list[Any]], expected: Sequence[Any], *, accepts: bool = True
) -> None:
    """Compare tokens and captured rows with those of an engine without drafts, some of which must be rejected."""
    seen = drafts.watch_drafts(llm)
    outputs = run(llm, *requests)
    assert any(accepted < made for made, accepted in seen), "no draft was rejected"
    assert not accepts or any(accepted > 0 for _, accepted in seen), "no draft was accepted"
    for i, (got, right) in enumerate(zip(outputs, expected, strict=True)):
        assert tokens_of(got) == tokens_of(right), i
        if right.outputs[0].capture_results:
            close_to(result(got), result(right), i)


def _hooked(model: Any) -> int:
    return sum(hasattr(module, "steering_taps") for module in model.modules())
