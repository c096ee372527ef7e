# SPDX-License-Identifier: Apache-2.0
"""The style score, on the standard library's code and prose, which its weights were not chosen on."""

from __future__ import annotations

import argparse
import configparser
import difflib
import inspect
import logging
import mailbox
import statistics
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.demo.train import prose, python_code
from tests.docs import style

MODULES = (argparse, configparser, difflib, logging, mailbox, statistics, textwrap)
LENGTH = 300  # characters, about what an example generates


@pytest.fixture(scope="module")
def code_pieces() -> list[str]:
    sources = [python_code.clean(inspect.getsource(module)) for module in MODULES]
    return [piece for source in sources if source for piece in cut(source)]


@pytest.fixture(scope="module")
def prose_pieces() -> list[str]:
    documents = [doc for module in MODULES for doc in prose.docstrings(inspect.getsource(module))]
    return [paragraph for document in documents for paragraph in prose.paragraphs(document)]


def cut(source: str) -> list[str]:
    """Return pieces of LENGTH characters, cut anywhere, as generated text is."""
    return [source[start : start + LENGTH] for start in range(0, len(source) - LENGTH, LENGTH)]


def test_code_scores_high(code_pieces: list[str]) -> None:
    """Catches a score that calls real code prose, as a constant low score would."""
    scores = [style.score(piece) for piece in code_pieces]
    assert len(scores) > 100
    assert sum(score > 0.5 for score in scores) >= 0.95 * len(scores)
    assert sum(scores) / len(scores) > 0.9


def test_prose_scores_low(prose_pieces: list[str]) -> None:
    """Catches a score that calls real prose code, as a constant high score would."""
    scores = [style.score(piece) for piece in prose_pieces]
    assert len(scores) > 100
    assert sum(score < 0.5 for score in scores) >= 0.95 * len(scores)
    assert sum(scores) / len(scores) < 0.1


def test_mixed_text_scores_between() -> None:
    """Catches a score that depends on the first line only."""
    code, text = "x = f(1)\ny = g(x)\n", "The value of this is shown to the user when it is known.\n"
    assert style.score(text) < style.score(text + code) < style.score(code)


def test_score_is_independent_of_length(code_pieces: list[str], prose_pieces: list[str]) -> None:
    """Catches features that are counts instead of shares: a repeated text has the score of the text."""
    for piece in (*code_pieces[:20], *prose_pieces[:20]):
        once, twice = (style.score(text) for text in (piece + "\n", f"{piece}\n{piece}\n"))
        assert once == pytest.approx(twice, abs=0.02)


@given(st.text())
def test_score_is_in_the_unit_interval(text: str) -> None:
    """Catches a division by zero or a value outside [0, 1] on unusual texts."""
    assert 0.0 <= style.score(text) <= 1.0


def test_blank_text_scores_one_half() -> None:
    """Catches an empty continuation that counts as code or as prose."""
    assert style.score("") == style.score(" \n\t") == 0.5
