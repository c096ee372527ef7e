# SPDX-License-Identifier: Apache-2.0
"""Fenced blocks, tables and links of Markdown files."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from markdown_it import MarkdownIt
from markdown_it.token import Token


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    """The first word after the fence, in lower case; empty if there is none."""
    code: str
    line: int
    """Line number of the opening fence, from 1."""
    file: str = ""
    """The document, for error messages."""


def blocks(text: str, file: str = "") -> Iterator[Block]:
    """Yield the fenced blocks of a document in order."""
    for token in MarkdownIt().parse(text):
        if token.type == "fence" and token.map:
            yield Block(token.info.strip().lower(), token.content, token.map[0] + 1, file)


def tables(text: str) -> Iterator[list[list[str]]]:
    """Yield the tables of a document in order: rows of cells as plain text, without backticks and escapes."""
    rows: list[list[str]] = []
    for token in MarkdownIt().enable("table").parse(text):
        match token.type:
            case "table_open":
                rows = []
            case "tr_open":
                rows.append([])
            case "inline" if rows and token.level >= 4:
                rows[-1].append(plain_text(token))
            case "table_close":
                yield rows
                rows = []


def links(text: str) -> Iterator[str]:
    """Yield the targets of the links and images of a document, those in HTML included."""
    for token in MarkdownIt().enable("table").parse(text):
        for child in token.children or ():
            target = child.attrGet("href") if child.type == "link_open" else child.attrGet("src")
            if target:
                yield str(target)
            elif child.type == "html_inline":
                yield from re.findall(r'\b(?:href|src)="([^"]+)"', child.content)


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, in the form that GitHub and the documentation site generate."""
    tokens = MarkdownIt().parse(text)
    headings = (tokens[i + 1] for i, token in enumerate(tokens) if token.type == "heading_open")
    return {re.sub(r"[^\w\- ]", "", plain_text(heading).lower()).replace(" ", "-") for heading in headings}


def plain_text(token: Token) -> str:
    return "".join(child.content for child in token.children or [])
