# SPDX-License-Identifier: Apache-2.0
"""The lab on a trained chat model: directions equal those of hooks, and verdicts tell an effect from noise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.run import MODEL
from demo.texts import CHOICE, MOOD, SHOWN
from tests.engine.conftest import close
from tests.lab.hf import Hooked, cosine
from tests.tiny import make_llm
from vllm_steer.lab import Directions, DoseResult, ProbeScore, check_probe, dose, make, read_examples, train_probe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="the chat model is missing: run `make model`"),
]
EXAMPLES = read_examples([{"positive": plus, "negative": minus} for plus, minus in MOOD.pairs])
PROMPTS = [
    *CHOICE, *SHOWN, "What is your favourite place?", "Describe a small town.", "What did the children do?",
    "Tell me about a journey by train.", "What happened at school?", "Write about an old house.",
]  # fmt: skip
LAYER, JUDGED, DOSE = 10, 20, 0.2
"""Layer that is steered, layer of the probe that judges texts, and the dose."""


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    engine = make_llm(MODEL, max_model_len=256, max_num_seqs=64, skip_tokenizer_init=False, num_gpu_blocks_override=128)
    yield engine
    close(engine)


def test_directions_are_those_of_hooks(llm: Any) -> None:
    """Catches the first token in the means, whose stream is a hundred times longer, and another tokenisation."""
    hooked, tokenizer = Hooked(MODEL), llm.get_tokenizer()
    rows = np.stack([hooked.run(tokenizer.encode(text))[:, 1:].mean(1) for text in EXAMPLES.texts], axis=1)
    differences = (rows[:, 0::2] - rows[:, 1::2]).astype(np.float64)
    means, components = make(llm, EXAMPLES), make(llm, EXAMPLES, method="pca")
    for layer in range(len(rows)):
        mean = differences[layer].mean(0)
        assert cosine(means[layer].unit, mean) > 0.9999, layer
        vector = np.linalg.eigh(differences[layer].T @ differences[layer])[1][:, -1]
        assert cosine(components[layer].unit, vector * np.sign(vector @ mean)) > 0.9999, layer
    assert means[12].auroc > 0.9 and 1 < means[12].stream < 200


@pytest.fixture(scope="module")
def score(llm: Any) -> ProbeScore:
    """Return the component of texts along the direction of a later layer, as the model without steering reads them."""
    return ProbeScore(make(llm, EXAMPLES, layers=JUDGED)[JUDGED].probe())


def study(llm: Any, directions: Directions, score: ProbeScore, **settings: Any) -> DoseResult:
    given = {
        "prompts": PROMPTS,
        "doses": [DOSE],
        "max_tokens": 16,
        "sampling": {"repetition_penalty": 1.15},
        **settings,
    }
    return dose(llm, directions, score=score, chat=True, **given)


def test_a_direction_of_examples_works(llm: Any, score: ProbeScore) -> None:
    """Catches a verdict that never finds an effect, and one that is not of the held-out prompts."""
    works = study(llm, make(llm, EXAMPLES, layers=LAYER), score, examples=EXAMPLES)
    assert works.outcome == "works", works.verdict
    assert works.range == (DOSE, DOSE) and works.chance(DOSE) < 0.005 and works.at(-DOSE).high < 0
    assert works.at(DOSE).prompts == len(works.study.held_out) == len(PROMPTS) // 2
    assert {each.prompt for each in works.samples if each.kind == "random"} == set(works.study.held_out)


@pytest.mark.parametrize("control", ["random", "shuffled"])
def test_controls_are_no_better_than_random(llm: Any, score: ProbeScore, control: str) -> None:
    """Catches a verdict that any vector of the right length passes."""
    directions = make(llm, EXAMPLES.shuffled(0) if control == "shuffled" else EXAMPLES, layers=LAYER)
    if control == "random":
        directions = Directions({LAYER: directions[LAYER].random(1, seed=99)[0]}, directions.model, "mean", {})
    found = study(llm, directions, score, controls=4)
    assert found.verdict.startswith("no better than random: "), found.verdict


def test_probes_of_answers_are_checked_on_answers(llm: Any, tmp_path: Path) -> None:
    """Catches scores of the question, and another end of the conversation than in training."""
    talks = [
        {"text": [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": text}], "label": label}
        for pair in MOOD.pairs
        for text, label in zip(pair, (True, False), strict=True)
    ]
    found = train_probe(llm, talks[:46], layers=LAYER, positions="assistant", pool="last")
    found.save(tmp_path / "mood.safetensors")
    held = found.result
    again = [{"text": text, "label": bool(label)} for text, label in zip(held.texts, held.labels, strict=True)]
    checked = check_probe(llm, tmp_path / "mood.safetensors", again)
    np.testing.assert_allclose(checked.scores, held.scores, atol=1e-4)
    assert checked.auroc > 0.9
    assert check_probe(llm, tmp_path / "mood.safetensors", talks[46:]).better_than_chance


def test_a_study_is_reproduced_from_its_seed(llm: Any, score: ProbeScore) -> None:
    """Catches texts or numbers that depend on the run, and a seed that changes nothing."""
    directions = make(llm, EXAMPLES, layers=LAYER)
    first, again, other = (
        study(llm, directions, score, prompts=PROMPTS[:8], controls=2, max_tokens=4, seed=seed) for seed in (0, 0, 1)
    )
    assert again.samples == first.samples and again.verdict == first.verdict
    assert {s.text for s in first.samples if s.kind == "random"} != {
        s.text for s in other.samples if s.kind == "random"
    }
