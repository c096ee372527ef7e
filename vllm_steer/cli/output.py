# SPDX-License-Identifier: Apache-2.0
"""Terminal output of commands: tables, escaped text and error messages."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer


def printable(text: str) -> str:
    """Escape characters of ``text`` that could move the cursor or reverse the line; ``text`` may come from a client."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def print_table(columns: tuple[str, ...], lines: Iterable[tuple[Any, ...]]) -> None:
    """Print a table: as wide as the terminal, or without line breaks in a pipe."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE)
    for column in columns:
        table.add_column(column, overflow="fold")
    for line in lines:
        table.add_row(*(Text(printable(str(cell))) for cell in line))
    Console(highlight=False, width=None if sys.stdout.isatty() else 1000).print(table)


def fail(error: object, status: int = 1) -> typer.Exit:
    """Print an error message to stderr and return the exception that ends the command with ``status``."""
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(status)


@contextmanager
def failing_on(*errors: type[Exception]) -> Iterator[None]:
    """Turn ``errors`` raised in the block into a message and exit status 1."""
    try:
        yield
    except errors as error:
        raise fail(error) from None
