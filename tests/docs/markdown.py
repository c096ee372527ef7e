# SPDX-License-Identifier: Apache-2.0
"""Reading the fenced blocks and the tables of a Markdown file."""

from collections.abc import Iterator
from dataclasses import dataclass

from markdown_it import MarkdownIt


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    """The word after the fence, in lower case; empty if there is none."""
    code: str
    line: int
    """Line number of the opening fence, from 1."""


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a document, in order."""
    for token in MarkdownIt().parse(text):
        if token.type == "fence" and token.map:
            yield Block(token.info.strip().lower(), token.content, token.map[0] + 1)


def tables(text: str) -> Iterator[list[list[str]]]:
    """The tables of a document, in order: rows of cells as they are read, without backticks and escapes."""
    rows: list[list[str]] = []
    for token in MarkdownIt().enable("table").parse(text):
        match token.type:
            case "table_open":
                rows = []
            case "tr_open":
                rows.append([])
            case "inline" if rows and token.level >= 4:
                rows[-1].append("".join(child.content for child in token.children or []))
            case "table_close":
                yield rows
                rows = []
