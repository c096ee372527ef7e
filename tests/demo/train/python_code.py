# SPDX-License-Identifier: Apache-2.0
"""Cleaning of Python sources for training: ASCII, hand-written, no licence headers, short docstrings.

Docstrings, and other strings that stand as statements, are cut to their first line. They are prose, and the
model is to keep the two kinds apart.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import warnings

MIN_BYTES, MAX_BYTES = 400, 200_000
MAX_LINE = 120
MAX_REPEATED = 0.4  # share of a file's line pairs that an earlier file already had


def clean(source: str) -> str | None:
    """Return the source as training text, or None if it does not look like hand-written Python."""
    if not MIN_BYTES <= len(source) <= MAX_BYTES or not source.isascii() or "\t" in source:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    lines = _shorten_docstrings(tree, source.replace("\r\n", "\n").split("\n"))
    while lines and (not lines[0].strip() or lines[0].startswith("#")):
        lines.pop(0)
    text = re.sub(r"\n{4,}", "\n\n\n", "\n".join(line.rstrip() for line in lines)).strip() + "\n"
    return text if _hand_written(text) else None


def _shorten_docstrings(tree: ast.Module, lines: list[str]) -> list[str]:
    out: list[str | None] = list(lines)
    bodies = [getattr(node, "body", None) for node in ast.walk(tree)]
    alone = {id(body[0]) for body in bodies if isinstance(body, list) and len(body) == 1}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        if not isinstance(node.value.value, str) or first == last:
            continue
        text = inspect.cleandoc(node.value.value).partition("\n")[0].strip()
        if '"' in text or "\\" in text or len(text) > 90:
            text = ""
        indent = " " * node.col_offset
        keep = f'{indent}"""{text}"""' if text else (f"{indent}pass" if id(node) in alone else None)
        out[first : last + 1] = [keep, *[None] * (last - first)]
    return [line for line in out if line is not None]


def _hand_written(text: str) -> bool:
    lines = [line for line in text.split("\n") if line]
    definitions = sum(line.lstrip().startswith(("def ", "class ", "async def ")) for line in lines)
    return (
        len(text) >= MIN_BYTES
        and max(map(len, lines)) <= MAX_LINE
        and definitions >= max(2, len(lines) // 60)
        and sum(map(str.isdigit, text)) <= 0.06 * len(text)
        and sum(line.lstrip().startswith("#") for line in lines) <= 0.3 * len(lines)
    )


class Repeats:
    """Filter for files that mostly repeat earlier ones, by pairs of neighbouring lines."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def is_new(self, text: str) -> bool:
        """Return whether most of the text is new, and if so, record its lines as seen."""
        lines = [line.strip() for line in text.split("\n") if len(line.strip()) > 8]
        pairs = {hash(pair) for pair in itertools.pairwise(lines)}
        if not pairs or len(pairs & self._seen) > MAX_REPEATED * len(pairs):
            return False
        self._seen |= pairs
        return True
