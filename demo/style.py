# SPDX-License-Identifier: Apache-2.0
"""How much a text looks like code: a score from 0 (prose) to 1 (code), out of counts to check by eye.

    score = logistic(sum of weight x feature)

The features are shares, so a text's length does not matter; the weights are round numbers chosen by hand
and held to both kinds of text by tests/demo/test_style.py.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_MARKS = re.compile(r"[=_()\[\]{}:<>+*/%@\"'#\\|&^~-]")
_STATEMENT = re.compile(
    r"\s*(?:(?:def|class|for|while|if|elif|with|async|try|except|else|finally|match|case)\b.*:\s*$"
    r"|(?:return|raise|yield|assert|import|from|del|pass|break|continue|global|await|print)\b(?!.*[a-z]\.\s*$)"
    r"|@\w|#|[\w.\[\]'\", *()]+\s*[-+*/|]?=[^=]|[\w.]+\(|[)\]}]+[,:]?\s*$)"
)
_FUNCTION_WORD = re.compile(
    r"\b(?:the|a|an|of|to|is|are|was|be|been|that|this|it|which|you|can|will|should|must|may|has|have|by|on|when)\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"[^\W\d_]+")
_SENTENCE_END = re.compile(r"[a-z)][.!?](?:\s|$)")


@dataclass(frozen=True)
class Features:
    """Shares, each in [0, 1]."""

    marks: float
    """Punctuation of code per character that is not white space."""
    statements: float
    """Lines that begin like a Python statement, per line with text."""
    indented: float
    """Lines that start with two or more spaces, per line with text."""
    function_words: float
    """`the`, `of`, `is` and the like, per word."""
    sentences: float
    """Sentence ends per ten words, at most 1."""


# At the bias alone, an empty text is undecided.
WEIGHTS = Features(marks=30.0, statements=3.0, indented=2.0, function_words=-16.0, sentences=-2.0)
BIAS = -1.0


def features(text: str) -> Features:
    """The counts behind the score."""
    lines = [line for line in text.splitlines() if line.strip()]
    words = _WORD.findall(text)
    solid = sum(not character.isspace() for character in text)
    return Features(
        marks=_share(len(_MARKS.findall(text)), solid),
        statements=_share(sum(bool(_STATEMENT.match(line)) for line in lines), len(lines)),
        indented=_share(sum(line.startswith("  ") for line in lines), len(lines)),
        function_words=_share(len(_FUNCTION_WORD.findall(text)), len(words)),
        sentences=min(1.0, 10 * _share(len(_SENTENCE_END.findall(text)), len(words))),
    )


def score(text: str) -> float:
    """From 0 (prose) to 1 (code); 0.5 for a text without any character but white space."""
    if not text.strip():
        return 0.5
    found = features(text)
    total = BIAS + sum(getattr(WEIGHTS, name) * getattr(found, name) for name in Features.__dataclass_fields__)
    return 1 / (1 + math.exp(-total))


def _share(count: int, whole: int) -> float:
    return count / whole if whole else 0.0
