# SPDX-License-Identifier: Apache-2.0
"""Alignment, axes, metrics and statistics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from vllm_steer import SteeringError
from vllm_steer.patching.axes import align, read_alignment, read_layers, read_positions, tile, windows
from vllm_steer.patching.metrics import LogProbs, Targets, check_gaps, divergence
from vllm_steer.patching.settings import read_corruption
from vllm_steer.patching.statistics import summarise


def test_alignment_of_unequal_prompts() -> None:
    """Catches a source one position off after the difference, and overlapping ends of repetitive prompts."""
    found = align([1, 2, 3, 4, 9], [1, 7, 4, 9])
    assert found.source_of == {0: 0, 2: 3, 3: 4} and found.skipped == (1,)
    assert align([5, 5, 5], [5, 5]).source_of == {0: 0, 1: 1}
    assert align([1, 2], [3, 4]).source_of == {0: 0, 1: 1}


@pytest.mark.parametrize("value", [[], [(0, 9)], [(0, 1), (2, 1)], [(0, "x")]])
def test_bad_alignment_is_refused(value: Any) -> None:
    """Catches pairs that leave the prompt, repeat a position or are not positions."""
    with pytest.raises(SteeringError, match="alignment"):
        read_alignment(value, 3, 3, "alignment")


def test_positions() -> None:
    """Catches negative positions, spans and texts that select other tokens."""
    pieces = ["The", " Eiffel", " Tow", "er", " is", " the", " tower"]
    given = [0, -1, [1, 3], {"span": "Eiffel Tower"}, {"span": "the", "occurrence": 0}]
    assert read_positions(given, pieces) == ((0, 1), (6, 7), (1, 3), (1, 4), (5, 6))
    assert read_positions("all", pieces) is None


def test_texts_beside_special_tokens() -> None:
    """Catches a word that is found in the name of a special token, such as the one that begins the prompt."""
    pieces = ["<|begin_of_text|>", "[INST]", "The", " text", " of", " INST", " texts"]
    given = [{"span": "text"}, {"span": "of"}, {"span": "INST"}, {"span": "text", "occurrence": 1}, {"span": "[INST]"}]
    assert read_positions(given, pieces) == ((3, 4), (4, 5), (5, 6), (6, 7), (1, 2))
    assert read_positions([{"span": "<|begin_of_text|>[INST]The"}], pieces) == ((0, 3),)
    for text in ("begin", ">[INST]", "<|begin_of_text|>[IN"):
        with pytest.raises(SteeringError, match="does not occur"):
            read_positions([{"span": text}], pieces)


@pytest.mark.parametrize("value", [[9], [[3, 3]], [{"span": "Rome"}], [{"span": " "}], [{"text": "x"}], "last", [1.5]])
def test_bad_positions_are_refused(value: Any) -> None:
    """Catches a position outside of the prompt, an empty span, and a text that the prompt lacks."""
    with pytest.raises(SteeringError, match="positions"):
        read_positions(value, ["a", " b"])


def test_windows_and_blocks() -> None:
    """Catches windows that leave the model, and blocks that leave out the last layers."""
    assert windows(read_layers("all", 4), 3, 4) == ((0, 2), (0, 3), (1, 4), (2, 4))
    assert windows(((1, 2),), 2, 4) == ((0, 2),)
    assert tile(5, 2) == ((0, 2), (2, 4), (4, 5))


def test_answers_of_several_tokens() -> None:
    """Catches a sequence that is scored by its first token, or by another's prefix."""
    targets = Targets((1, 2), (3,))
    assert targets.passes == (((), (1, 3)), ((1,), (2,)))
    measures = targets.combine([{1: -1.0, 3: -2.0}, {2: -0.5}], {}, lambda logprobs: logprobs.answer - 1)
    assert measures.tolist()[:2] == [-1.5, -2.0] and math.isnan(measures[2]) and measures[3] == -2.5


def test_a_metric_that_returns_no_number() -> None:
    """Catches a NaN of a custom metric that is entered as a value."""

    def metric(logprobs: LogProbs) -> float:
        return math.nan

    with pytest.raises(ValueError, match="nan"):
        Targets((1,)).combine([{1: -1.0}], {}, metric)


def test_divergence() -> None:
    """Catches a divergence of the wrong direction, and one that forgets the tokens that are not listed."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    full = divergence(dict(enumerate(np.log(p))), dict(enumerate(np.log(q))))
    assert full == pytest.approx(float((p * np.log(p / q)).sum()))
    merged = divergence({0: math.log(0.5), 1: math.log(0.3)}, {0: math.log(0.2), 2: math.log(0.6)})
    assert merged == pytest.approx(0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8))
    assert merged < full


def test_small_denominators_are_refused() -> None:
    """Catches `recovered` that divides by zero or by noise."""
    check_gaps(np.array([1.0]), np.array([0.0]), "logit_diff")
    for corrupt in (1.0, 1.0005):
        with pytest.raises(SteeringError, match=r"1 - 1"):
            check_gaps(np.array([1.0]), np.array([corrupt]), "logit_diff")


def test_statistics() -> None:
    """Catches a p-value without the observed signs, an error with the wrong divisor, and NaN that counts as zero."""
    effects = np.array([[1.0, 1.0, np.nan], [2.0, -1.0, 0.0], [3.0, 0.5, 0.0]])
    found = summarise(effects)
    assert found.effect[0] == 2 and found.standard_error[0] == pytest.approx(1 / math.sqrt(3))
    assert found.p_value[0] == 0.25  # all signs equal: 2 of 8 patterns
    assert found.low[0] < 2 < found.high[0]
    assert np.isnan([found.effect[2], found.p_value[2]]).all()


def test_p_values_of_sums_that_cancel() -> None:
    """Catches patterns with the observed sum that do not count because their terms are added in another order."""
    assert summarise(np.array([[1.0], [1e-5], [-1.0]])).p_value[0] == 1


def test_p_values_of_many_pairs() -> None:
    """Catches a probability of 0: the observed signs count as one of the patterns that are drawn."""
    assert summarise(np.ones((40, 1))).p_value[0] == 1 / 4097


@pytest.mark.parametrize(
    "given",
    [
        {"has_corrupt": False},
        {"has_corrupt": True, "noise": 3.0, "subject": "x"},
        {"has_corrupt": False, "noise": 3.0},
        {"has_corrupt": False, "noise": -1.0, "subject": "x"},
        {"has_corrupt": False, "ablate": "nothing"},
        {"has_corrupt": False, "ablate": "zero", "reference": ["x"]},
        {"has_corrupt": True, "draws": 2},
        {"has_corrupt": True, "seed": -1},
    ],
)
def test_bad_corruptions_are_refused(given: dict[str, Any]) -> None:
    """Catches a study with two corruptions or none, and an argument that would be ignored."""
    rest = dict.fromkeys(("noise", "subject", "draws", "ablate", "reference"), None)
    with pytest.raises(SteeringError):
        read_corruption(**{**rest, "seed": 0, **given})
