# SPDX-License-Identifier: Apache-2.0
"""Steering expressions: their terms, their text, and the edits that they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_steer import SamplingParams, SteeringError
from vllm_steer.lab import Expression
from vllm_steer.registry.directions import Direction, Directions
from vllm_steer.registry.expression import Term

TEXT = "0.7 calm@answer - 0.3 formal + ablate refusal when suspicion > 0.5"
UNIT = np.eye(4, dtype=np.float32)


def directions(*layers: int) -> Directions:
    return Directions({n: Direction("post_block", n, UNIT[n], 10.0 + n) for n in layers}, "m", "mean", {})


def test_an_expression_is_read_and_printed() -> None:
    """Catches a sign, part or condition that belongs to another term, and a text that is printed differently."""
    read = Expression.parse(TEXT)
    assert read.terms == (
        Term("calm", 0.7, part="answer"),
        Term("formal", -0.3),
        Term("refusal", ablate=True, when=("suspicion", ">", 0.5)),
    )
    assert str(read) == TEXT
    small = Expression.parse("1e-3 calm when x > -2.5E2 + .5e+1 b")
    assert small.terms == (Term("calm", 0.001, when=("x", ">", -250.0)), Term("b", 5.0))
    sloppy = Expression.parse(" -calm@first:20 + .5  ablate b when x<-1")
    assert str(sloppy) == "- 1 calm@first:20 + 0.5 ablate b when x < -1"


names = st.from_regex(r"[a-z][a-z0-9_.]{0,8}", fullmatch=True).filter(lambda name: name not in ("when", "ablate"))
numbers = st.floats(-1e6, 1e6, allow_nan=False)
parts = st.sampled_from([None, "answer", "prompt", "first:20", "after:3"])
conditions = st.none() | st.tuples(names, st.sampled_from("<>"), numbers)
adds = st.builds(Term, names, numbers, st.just(False), parts, conditions)
ablations = st.builds(Term, names, st.floats(1e-6, 1), st.just(True), parts, conditions)


@given(st.lists(adds | ablations, min_size=1, max_size=4))
def test_every_expression_prints_back_to_itself(terms: list[Term]) -> None:
    """Catches numbers that are rounded or printed with an exponent, and signs of zero and of the first term."""
    expression = Expression(tuple(terms))
    again = Expression.parse(str(expression))
    assert again == expression and str(again) == str(expression)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("0.7", "cannot be read from '0.7' on"),
        ("calm formal", "cannot be read from ' formal' on"),
        ("1e3", "cannot be read from '1e3' on; write it as 0.7 calm"),
        ("0.2 calm-0.1 formal", "from ' formal' on: a plus or minus needs a space before it; write it as 0.7 calm"),
        ("calm -1e-3 mood+0.1 formal", "from ' -1e-3 mood+0.1 formal' on: a plus or minus needs a space before it"),
        ("calm-0.1 mood + 1e-3 1", "from ' mood + 1e-3 1' on: a plus"),
        ("calm - 1e-3 mood mood", "from ' mood' on; write"),
        ("0.2*calm + 0.1*formal", "on: write a number and a name with a space between them, without *; write it as"),
        ("1e calm", "cannot be read"),
        ("calm + ", "cannot be read from ' + ' on"),
        ("calm - - formal", "cannot be read from ' - - formal' on"),
        ("ablate", "cannot be read from 'ablate' on"),
        ("calm when mood", "cannot be read from ' when mood' on"),
        ("calm when mood > x", "cannot be read"),
        ("calm@answer:3", "has @answer:3; a number is for first and after only"),
        ("calm@first", "has @first; a number is for"),
        ("2 ablate calm", "ablates 2 of calm; the share is above 0 and at most 1"),
        ("calm - ablate formal", "ablates -1 of formal"),
        ("calm + " * 600, "has 4200 characters; at most 4096 are read"),
    ],
)
def test_other_texts_are_refused(text: str, problem: str) -> None:
    """Catches a part of the text that is skipped."""
    with pytest.raises(SteeringError) as error:
        Expression.parse(text)
    assert error.value.field == "expression" and problem in error.value.problem


@pytest.mark.parametrize(
    "text",
    [start + " " * 4000 + "!" for start in ("", "+", "calm", "ablate", "calm when", "calm when a", "calm when a >")]
    + ["1" * 4000 + "!", "a." * 2000 + "!"],
    ids=lambda text: repr(text[:14]),
)
def test_long_texts_are_refused_at_once(text: str) -> None:
    """Catches a pattern that searches a text in more than quadratic time: it takes hours, and a server stands still."""
    with pytest.raises(SteeringError, match="cannot be read from"):
        Expression.parse(text)


def test_edits_of_an_expression(tmp_path: Path) -> None:
    """Catches a dose taken for a strength, and edits that a request refuses."""
    directions(1).save(tmp_path / "formal.safetensors")
    vectors: dict[str, Any] = {
        "calm": directions(2, 3), "formal": tmp_path / "formal.safetensors", "refusal": directions(3)
    }  # fmt: skip
    edits = Expression.parse(TEXT).edits(vectors)
    assert [(edit.kind, edit.layers[0]) for edit in edits] == [("add", 2), ("add", 3), ("add", 1), ("ablate", 3)]
    np.testing.assert_allclose(edits[1].strength * edits[1].vector, 0.7 * 13 * UNIT[3], rtol=1e-6)
    np.testing.assert_allclose(edits[2].strength * edits[2].vector, -0.3 * 11 * UNIT[1], rtol=1e-6)
    assert edits[3].strength == 1 and [each.above for each in edits[3].when] == [0.5]
    readouts = {"suspicion": {"probe": [1.0] * 4, "point": "post_block", "layer": 0}}
    assert SamplingParams(max_tokens=1, steering=edits, readouts=readouts) is not None
    first = Expression.parse("calm@first:20 + calm@after:20").edits({"calm": directions(2)})
    assert [edit.tokens.to_wire() for edit in first] == [{"generated": [[0, 20]]}, {"generated": [[20, None]]}]
    with pytest.raises(SteeringError, match="names calm, which is not among the vectors: formal"):
        Expression.parse("calm").edits({"formal": directions(1)})
    with pytest.raises(SteeringError, match="means 257 edits, one for each term and layer; at most 256"):
        Expression.parse("calm" + " + calm" * 256).edits({"calm": directions(1)})
    unknown = Directions({1: Direction("post_block", 1, UNIT[1], float("nan"))}, "m", "mean", {})
    with pytest.raises(SteeringError, match="gives a dose of calm, which does not tell the length of the stream at"):
        Expression.parse("calm").edits({"calm": unknown})
    assert Expression.parse("ablate calm").edits({"calm": unknown})
    with pytest.raises(SteeringError, match="tokens: 'answers' is not"):
        Expression.parse("calm@answers").edits({"calm": directions(1)})
