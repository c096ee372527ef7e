# SPDX-License-Identifier: Apache-2.0
"""What commands print."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def printable(text: str) -> str:
    """``text``, which may be a client's, without what could move the cursor or turn the line around."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def print_table(columns: tuple[str, ...], lines: Iterable[tuple[Any, ...]]) -> None:
    """A table as wide as the screen; elsewhere than on a screen, lines are as long as they are."""
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
