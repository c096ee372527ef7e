# SPDX-License-Identifier: Apache-2.0
"""What `make demo` prints: tables of texts and numbers, and each check with its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from demo.checks import Check
from demo.texts import MOOD

CONSOLE = Console(width=140, highlight=False)
SHOWN_SCORE = 0.7
"""Smallest size of a token's score that is printed."""


def headline(text: str) -> None:
    """Print the title of a step."""
    CONSOLE.print(f"\n[bold]{text}[/]")


def print_table(head: Sequence[str], rows: Sequence[Sequence[Any]], equal: bool = False) -> None:
    """Print a table, with numbers to two digits. ``equal`` makes the columns equally wide."""
    table = Table(show_lines=equal)
    for name in head:
        table.add_column(name, ratio=1 if equal else None, overflow="fold")
    for row in rows:
        cells = (f"{cell:.2f}" if isinstance(cell, float) else "" if cell is None else str(cell) for cell in row)
        table.add_row(*map(escape, cells))
    CONSOLE.print(table)


def print_answers(rows: Sequence[dict[str, str]]) -> None:
    """Print prompts and their answers in three columns."""
    head = ("prompt", f"towards {MOOD.minus}", "plain", f"towards {MOOD.plus}")
    print_table(head, [[row[name] for name in ("prompt", "minus", "plain", "plus")] for row in rows], equal=True)


def print_scored(piece: str, score: float) -> None:
    """Print a piece of a stream, with its score if it is clearly negative (blue) or positive (red)."""
    if abs(score) < SHOWN_SCORE:
        CONSOLE.print(escape(piece), end="")
    else:
        CONSOLE.print(f"[bold {'blue' if score < 0 else 'red'}]{escape(f'{piece} ({score:+.1f})')}[/]", end="")


def print_checks(checks: Sequence[Check], step: str) -> None:
    """Print the checks of a step."""
    for check in checks:
        if check.step == step:
            CONSOLE.print(f"  {'[green]holds[/]' if check.holds else '[bold red]FAILS[/]'}  {escape(check.claim)}")
