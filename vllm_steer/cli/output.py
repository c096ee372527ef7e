# SPDX-License-Identifier: Apache-2.0
"""Terminal output of commands: tables, escaped text and error messages."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

_PIPE_WIDTH = 1_000_000
"""Characters of a line in a pipe: more than any table has."""


def group(text: str) -> typer.Typer:
    """Return a group of commands with this help."""
    return typer.Typer(help=text, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


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
    Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)


def fail(error: object, status: int = 1) -> typer.Exit:
    """Print an error message to stderr and return the exception that ends the command with ``status``."""
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(status)


def check_outputs(*paths: Path | None) -> None:
    """End the command unless the files can be written. For commands that take long to compute what they write."""
    for path in paths:
        if path is not None:
            _check_output(path)


def _check_output(path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise fail(f"folder not found: {folder}")
    try:
        if path.is_dir():
            raise fail(f"{path} is a folder; name a file in it")
        existed = path.exists()
        if existed and not path.is_file():  # a pipe would see its writer come and go
            return
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise fail(f"{path} cannot be written: {error.strerror or error}") from None


@contextmanager
def failing_on(*errors: type[Exception]) -> Iterator[None]:
    """Turn ``errors`` raised in the block into a message and exit status 1."""
    try:
        yield
    except BrokenPipeError:  # the reader of the output has ended, as with head; click ends without a message
        raise
    except errors as error:
        raise fail(error) from None


@contextmanager
def warning_last() -> Iterator[None]:
    """Print the warnings of the block, or of a decorated command, to stderr at its end."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            yield
    finally:
        for each in caught:
            if issubclass(each.category, RuntimeWarning):
                typer.echo(f"warning: {each.message}", err=True)
            else:
                warnings.showwarning(each.message, each.category, each.filename, each.lineno)


def check_image(path: Path) -> None:
    """End the command unless matplotlib is installed and can write an image of this name."""
    with failing_on(ImportError):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    types = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in types:
        raise fail(f"--plot {path}: unknown suffix {path.suffix}; use one of {', '.join(sorted(types))}")
