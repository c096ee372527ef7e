# SPDX-License-Identifier: Apache-2.0
"""Extraction of English prose from documentation: docstrings, reStructuredText, Markdown and HTML.

A paragraph is kept only when it reads like sentences, so code blocks, tables, option lists and
signatures fall out by the same few counts whatever markup they came in.
"""

from __future__ import annotations

import ast
import html
import inspect
import re
import warnings
from collections.abc import Iterator

STOP_WORDS = frozenset(
    (
        "a", "about", "after", "all", "also", "an", "and", "any", "are", "as", "at", "be", "been",
        "before", "both", "but", "by", "can", "do", "does", "each", "for", "from", "had", "has", "have",
        "how", "if", "in", "into", "is", "it", "its", "like", "may", "more", "most", "must", "no",
        "not", "of", "on", "one", "only", "or", "other", "out", "over", "should", "so", "some", "such",
        "than", "that", "the", "their", "them", "then", "there", "these", "they", "this", "those", "to",
        "up", "use", "used", "uses", "using", "was", "we", "were", "what", "when", "where", "which",
        "while", "will", "with", "would", "you", "your",
    )
)  # fmt: skip
MIN_WORDS = 7
_ASCII = str.maketrans(
    {
        "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": " - ",
        "\u2026": "...", "\u00a0": " ", "\u2192": "->", "\u00d7": "x", "\u2022": "-",
    }
)  # fmt: skip
_MARKUP: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), into)
    for pattern, into in (
        (r"<!--.*?-->", " "),
        (r"</?[a-zA-Z][^<>]{0,200}>", " "),  # HTML tags
        (r"!\[[^\]]*\]\([^)]*\)", " "),  # Markdown image
        (r"\[([^\]]+)\]\([^)]*\)", r"\1"),  # Markdown link
        (r"\[([^\]]+)\]\[[^\]]*\]", r"\1"),
        (r":[a-zA-Z:+-]+:`~?!?(?:[\w.]+\.)?([^`<]+?)\s*(?:<[^`]*>)?`", r"\1"),  # reStructuredText role
        (r"`([^`<]+?)\s*<[^`>]*>`_{1,2}", r"\1"),  # reStructuredText link
        (r"\s?\[(?:\d+|#\w*|[A-Z]\w*\d+)\]_?", ""),  # footnote and citation marks
        (r"`([^`]+)`_{1,2}", r"\1"),
        (r"``?([^`]+)``?", r"\1"),
        (r"\*\*([^*]+)\*\*", r"\1"),
        (r"(?<!\w)\*([^*\s][^*]*)\*(?!\w)", r"\1"),
        (r"(?<!\w)_([^_\s][^_]*)_(?!\w)", r"\1"),
        (r"\s*\((?:https?://|see https?://)[^)\s]*\)", ""),
        (r"^(?:[-*+\u2022]|\d{1,2}[.)]|\(\w\)|#\.|>|:[\w ]+:)\s+", ""),  # list bullets, quotes, field names
        (r"^(?:\.\.\s+)?(?:note|warning|tip|important|caution)::?\s+", ""),
        (r"\s+([,;:!?)]|\.(?:\s|$))", r"\1"),
        (r"\s+", " "),
    )
)
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_CODE_MARKS = re.compile(r"[=_{}\[\]<>\\/|#@$^~*+&%`]")
_BREAKS = (".. ", ">>>", "|", "+--", ":param", "@")
_LITERAL_DIRECTIVE = re.compile(
    r"\.\. (?:code|sourcecode|math|literal|parsed-literal|raw|image|figure|toctree|list-table|csv-table|"
    r"highlight|productionlist|ipython|plot|testcode)"
)
_FIELD = re.compile(r":[\w ]+:(?!`)")  # `:raises:`, and not a role at the start of a line
_BULLET = re.compile(r"^\s*(?:[-*+]|\d{1,2}[.)])\s+\S")
_SECTION = re.compile(r"\b(?:Args|Arguments|Attributes|Parameters|Returns|Raises|Yields|Examples?): ")
_RULE = re.compile(r"^\s*(?:[-=~^\"'#*+`:.|_]{3,}[-=~^\"'#*+`:.|_ ]*)$")


def plain(paragraph: str) -> str:
    """Return a paragraph as one line of ASCII text without markup."""
    text = html.unescape(paragraph.translate(_ASCII)).translate(_ASCII).strip()
    for pattern, into in _MARKUP:
        text = pattern.sub(into, text)
    return text.strip()


def is_running_english(text: str) -> bool:
    """Return whether a cleaned paragraph consists of sentences: capital to full stop, common words, little code."""
    if not text.isascii() or not text[:1].isupper() or text[-1] not in ".!?":
        return False
    words = _WORD.findall(text)
    if len(words) < MIN_WORDS or "://" in text or ">>>" in text or _SECTION.search(text):
        return False
    letters = sum(map(str.isalpha, text)) + text.count(" ")
    common = sum(word.lower() in STOP_WORDS for word in words)
    return (
        letters >= 0.92 * len(text)
        and len(_CODE_MARKS.findall(text)) <= 0.008 * len(text)
        and common >= 0.25 * len(words)
        and text.count("(") == text.count(")")
        and max(map(len, text.split())) <= 30
        and sum(word[0].isupper() for word in words) <= 0.3 * len(words)
    )


def paragraphs(document: str) -> Iterator[str]:
    """Return the cleaned English paragraphs of a reStructuredText, Markdown or plain document, in order."""
    fenced = False
    literal_indent = -1  # >= 0: inside a literal block, directive body or code block deeper than this
    block: list[str] = []

    def close() -> Iterator[str]:
        text = plain(" ".join(block))
        block.clear()
        if text and is_running_english(text):
            yield text

    for line in document.expandtabs(4).splitlines():
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if stripped.startswith(("```", "~~~")):
            yield from close()
            fenced = not fenced
            continue
        if fenced or (literal_indent >= 0 and stripped and indent > literal_indent):
            continue
        if stripped:
            literal_indent = -1
        if not stripped or _RULE.match(line) or stripped.startswith(_BREAKS):
            yield from close()
            if _LITERAL_DIRECTIVE.match(stripped):
                literal_indent = indent
            continue
        if _BULLET.match(line) or _FIELD.match(stripped):
            yield from close()
        block.append(stripped)
        if stripped.endswith("::"):
            block[-1] = stripped[:-2] + ("." if stripped[-3:-2].isalnum() else "")
            yield from close()
            literal_indent = indent
    yield from close()


def docstrings(source: str) -> Iterator[str]:
    """Return the docstrings of a Python source, in order; empty if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield inspect.cleandoc(text)


def text_of_html(markup: str) -> str:
    """Return HTML documentation with block tags replaced by paragraph breaks."""
    return re.sub(r"</?(?:p|li|ul|ol|note|important|dl|dt|dd|div|br|h\d|pre)\b[^>]*>", "\n\n", markup)
