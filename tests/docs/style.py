# SPDX-License-Identifier: Apache-2.0
"""A score of how much a text looks like code, from 0 (prose) to 1 (code).

    score = logistic(sum of weight x feature)

The features are shares, so the score does not depend on a text's length. The weights are round numbers chosen by hand;
tests/docs/test_style.py checks them on code and prose.
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
    """Features of a text, each a share in [0, 1]."""

    marks: float
    """Code punctuation per non-space character."""
    statements: float
    """Lines that begin like a Python statement, per non-blank line."""
    indented: float
    """Lines that start with two or more spaces, per non-blank line."""
    function_words: float
    """Function words such as `the`, `of` and `is`, per word."""
    sentences: float
    """Sentence ends per ten words, at most 1."""


WEIGHTS = Features(marks=30.0, statements=3.0, indented=2.0, function_words=-16.0, sentences=-2.0)
BIAS = -1.0


def features(text: str) -> Features:
    """Compute the features of a text."""
    lines = [line for line in text.splitlines() if line.strip()]
    words = _WORD.findall(text)
    visible = sum(not character.isspace() for character in text)
    return Features(
        marks=_share(len(_MARKS.findall(text)), visible),
        statements=_share(sum(bool(_STATEMENT.match(line)) for line in lines), len(lines)),
        indented=_share(sum(line.startswith("  ") for line in lines), len(lines)),
        function_words=_share(len(_FUNCTION_WORD.findall(text)), len(words)),
        sentences=min(1.0, 10 * _share(len(_SENTENCE_END.findall(text)), len(words))),
    )


def score(text: str) -> float:
    """Return the score of a text; 0.5 for blank text."""
    if not text.strip():
        return 0.5
    found = features(text)
    total = BIAS + sum(getattr(WEIGHTS, name) * getattr(found, name) for name in Features.__dataclass_fields__)
    return 1 / (1 + math.exp(-total))


def _share(count: int, whole: int) -> float:
    return count / whole if whole else 0.0
