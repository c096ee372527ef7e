# SPDX-License-Identifier: Apache-2.0
"""The demo's checks hold for the recorded results, and each of them fails for results without the effect."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from demo import server, texts
from demo.checks import STEPS, checks
from demo.measures import perplexities
from demo.run import MODEL, RECORD
from demo.study import choose
from tests.repo.tree import read
from vllm_steer.lab import Direction

Results = dict[str, Any]


@pytest.fixture
def results() -> Results:
    found: Results = copy.deepcopy(json.loads(RECORD.read_text()))
    return found


def failed(results: Results) -> set[str]:
    return {check.step for check in checks(results) if not check.holds}


def test_recorded_results_hold(results: Results) -> None:
    """Catches a record of a failed run, one without a step, and a bound that was changed without a new run."""
    assert failed(results) == set()
    assert {check.step for check in checks(results)} == {step.__name__ for step in STEPS}


def incoherent(results: Results) -> None:
    for cell in results["doses"][1:]:
        cell["perplexity"] *= 2


def lucky_random_direction(results: Results) -> None:
    results["control"]["random"][7] = results["control"]["plus"]


def random_direction_of_the_other_sign(results: Results) -> None:
    results["control"]["random"][4] = results["control"]["plus"] * -1.1


def few_random_directions(results: Results) -> None:
    del results["control"]["random"][10:]


def no_effect(results: Results) -> None:
    results["shown"]["mood"]["plus"] = results["shown"]["mood"]["plain"]


def swapped(results: Results) -> None:
    mood = results["shown"]["mood"]
    mood["plus"], mood["minus"] = mood["minus"], mood["plus"]


def gibberish(results: Results) -> None:
    results["shown"]["perplexity"]["minus"] = 50.0


def blind_probe(results: Results) -> None:
    results["probe"]["scores"][1] = results["probe"]["scores"][0]


def uncertain_probe(results: Results) -> None:
    results["probe"]["separation"] = 0.4


def open_gate(results: Results) -> None:
    results["gate"]["rows"][-1]["steered"] = 1.0


def leaking_gate(results: Results) -> None:
    results["gate"]["rows"][-1]["gated"] += " :-)"


def closed_gate(results: Results) -> None:
    results["gate"]["rows"][0]["steered"] = 0.0


def useless_ablation(results: Results) -> None:
    results["ablation"]["ablated"] = results["ablation"]["plain"]


def destructive_ablation(results: Results) -> None:
    results["ablation"]["random"][3] = 0.0


def other_server(results: Results) -> None:
    results["http"]["plus"] = results["http"]["plain"]


def deaf_monitor(results: Results) -> None:
    for stream in results["http"]["streams"]:
        stream["scores"] = [0.0] * len(stream["scores"])


BROKEN: dict[str, tuple[Callable[[Results], None], ...]] = {
    "dose": (incoherent,),
    "control": (lucky_random_direction, random_direction_of_the_other_sign, few_random_directions),
    "shown": (no_effect, swapped, gibberish),
    "probe": (blind_probe, uncertain_probe),
    "gate": (open_gate, leaking_gate, closed_gate),
    "ablation": (useless_ablation, destructive_ablation),
    "http": (other_server, deaf_monitor),
}


@pytest.mark.parametrize(("step", "broken"), [(step, each) for step, found in BROKEN.items() for each in found])
def test_a_missing_effect_fails(results: Results, step: str, broken: Callable[[Results], None]) -> None:
    """Catches a check that passes whatever the demo finds."""
    broken(results)
    assert failed(results) == {step}


def cell(layer: int | None, dose: float, mood: float, perplexity: float) -> Results:
    return {"layer": layer, "dose": dose, "mood": mood, "perplexity": perplexity}


def test_incoherent_doses_are_not_chosen() -> None:
    """Catches a choice by the effect alone, and doses of two layers."""
    cells = [
        cell(None, 0.0, 0.0, 3.0),
        cell(1, -0.1, -3.0, 4.0), cell(1, 0.1, 3.0, 4.0), cell(1, 0.3, 20.0, 7.0),
        cell(2, -0.1, -9.0, 4.0), cell(2, 0.1, 1.0, 4.0), cell(2, -0.3, -2.0, 5.0),
        cell(3, -0.1, -30.0, 4.0), cell(3, 0.1, 9.0, 99.0),
    ]  # fmt: skip
    assert choose(cells) == {"layer": 2, "minus": -0.1, "plus": 0.1, "spread": 10.0}
    with pytest.raises(RuntimeError, match=r"perplexity up to 6\.0"):
        choose([cells[0], cells[-1]])


def test_perplexity_needs_the_generated_tokens_only() -> None:
    """Catches a mean over the prompt, whose tokens the model did not write."""

    class Given:
        def __init__(self, **fields: Any) -> None:
            self.__dict__.update(fields)

    class Engine:
        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
            losses = {1: 9.0, 2: 9.0, 3: 0.5, 4: 1.5}
            return [
                Given(
                    prompt_token_ids=each["prompt_token_ids"],
                    prompt_logprobs=[None, *({t: Given(logprob=-losses[t])} for t in each["prompt_token_ids"][1:])],
                )
                for each in prompts
            ]

    output = Given(prompt_token_ids=[1, 2], outputs=[Given(token_ids=[3, 4])])
    assert perplexities(Engine(), [[output], [output]]) == pytest.approx([2.718281828] * 2)


def test_a_streamed_score_belongs_to_the_token_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches scores that are printed with the next token, and a first or last piece that is not printed."""

    def event(piece: str, *values: float) -> Any:
        readouts = {"mood": {"values": list(values)}} if values else None
        return SimpleNamespace(choices=[SimpleNamespace(delta=SimpleNamespace(content=piece), readouts=readouts)])

    events = [event(""), event("a"), event(" sad", 0.1), event(" end", -2.0), SimpleNamespace(choices=[])]
    monkeypatch.setattr(server, "ask", lambda *arguments, **fields: events)
    probe = Direction("post_block", 1, np.ones(4, np.float32) / 2, 1.0, 2.0, np.zeros(4, np.float32))
    shown: list[tuple[str, float]] = []
    found = server.monitor(None, "?", probe, lambda *each: shown.append(each))  # type: ignore[arg-type]
    assert shown == [("a", 0.1), (" sad", -2.0), (" end\n", 0.0)]
    assert (found["text"], found["scores"]) == ("a sad end", [0.1, -2.0])


def test_texts_that_are_shown_have_no_part_in_a_choice() -> None:
    """Catches a prompt that was moved from the choice to the result, and a sentence that the probe has seen."""
    made_from = {text for trait in texts.TRAITS for pair in trait.pairs for text in pair}
    judged = {*texts.SHOWN, *texts.STREAMED, *texts.SAD_REQUESTS, *texts.OTHER_REQUESTS}
    assert not judged & {*made_from, *texts.CHOICE}
    assert not made_from & {text for pair in (*texts.HELD_OUT, *texts.CONTEXTS) for text in pair}
    assert len(texts.MOOD.pairs) == len(set(texts.MOOD.pairs)) == 30
    assert not set(texts.HAPPY_WORDS.split()) & set(texts.SAD_WORDS.split())


def test_mood_counts_words() -> None:
    """Catches parts of words that count, and a score that grows with the length of the text."""
    assert texts.mood("A happy day. " * 3) == texts.mood("A happy day.") == 100 / 3
    assert texts.mood("The sad, SAD lad") == -50
    assert texts.mood("unhappy") == 0
    assert texts.mood("") == 0


@pytest.mark.skipif(not MODEL.exists(), reason="the chat model is missing: run `make model`")
def test_words_are_single_tokens() -> None:
    """Catches a word that the log-odds would judge by its first syllable."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for trait in texts.TRAITS:
        for word in (*trait.plus_words, *trait.minus_words):
            assert len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1, word


def test_the_readme_shows_the_recorded_answers(results: Results) -> None:
    """Catches answers that were written by hand."""
    readme = read("README.md")
    chosen = texts.ordered(results["shown"]["rows"])[0]
    for name in ("minus", "plain", "plus"):
        assert " ".join(chosen[name].split()) in readme


def test_the_readme_chooses_by_mood() -> None:
    """Catches an answer that is shown though steering did not move its mood in both directions."""
    sad, plain, happy = "a grim and sad day", "a day", "a lovely day"
    rows = [dict(zip(("minus", "plain", "plus"), row, strict=True)) for row in permutations((sad, plain, happy))]
    rows.append({"minus": sad, "plain": plain, "plus": plain})
    assert texts.ordered(rows) == rows[:1]
