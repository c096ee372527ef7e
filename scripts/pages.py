# SPDX-License-Identifier: Apache-2.0
"""What the scripts that write pages share: the folder of results, and tables in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table in Markdown. A bar in a cell is escaped."""
    rows = list(rows)
    if wrong := [row for row in rows if len(row) != len(head)]:
        raise ValueError(f"not {len(head)} cells: {wrong[0]}")
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def load_result(name: str) -> Any:
    """Return a file of the folder of results."""
    return json.loads((RESULTS / name).read_text())
