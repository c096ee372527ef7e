# SPDX-License-Identifier: Apache-2.0
"""Print the differences between each architecture and HF Transformers, by hook point.

    python scripts/parity_table.py                       every architecture, eager
    python scripts/parity_table.py llama gpt2 --mode compiled
    python scripts/parity_table.py --json benchmarks/results/parity.json

Each number is the largest difference of a log-probability, over the whole vocabulary, all prompt and generated tokens
and all requests that edit that point. The exit status is 1 if a number exceeds the tolerance.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.conformance.edits import POINTS
from tests.conformance.engine import prepare_environment
from tests.conformance.parity import MIN_EFFECT, TOLERANCE, Report, examine
from tests.conformance.reference_process import ReferenceProcess
from tests.conformance.zoo import BY_NAME
from vllm_steer import __version__


class Mode(StrEnum):
    """How the engine runs the model; the keys of ``engine.MODES``."""

    EAGER = "eager"
    TRACED = "traced"
    COMPILED = "compiled"


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Rows of tests/conformance/zoo.py; all if none.")] = None,
    mode: Annotated[Mode, typer.Option(help="How the engine runs the model.")] = Mode.EAGER,
    out: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
) -> None:
    """Run the conformance cases and print the table."""
    unknown = [name for name in names or () if name not in BY_NAME or BY_NAME[name].gpu_only]
    if unknown:
        steered = ", ".join(name for name, tiny in BY_NAME.items() if not tiny.gpu_only)
        raise typer.BadParameter(f"no such rows for a CPU: {', '.join(unknown)}; choose from {steered}")
    prepare_environment()
    chosen = [tiny for name, tiny in BY_NAME.items() if (name in names if names else not tiny.gpu_only)]
    with tempfile.TemporaryDirectory() as folder, ReferenceProcess() as reference:
        reports = [examine(tiny, mode.value, Path(folder), reference) for tiny in chosen]
    Console(width=None if sys.stdout.isatty() else 140).print(table_of(reports, mode.value))
    if out is not None:
        out.write_text(json.dumps(figures_of(reports, mode.value), indent=1) + "\n")
    if not all(_agrees(report) for report in reports):
        raise typer.Exit(1)


def table_of(reports: list[Report], mode: str) -> Table:
    """Return a table with one line per report."""
    table = Table(title=f"Largest difference from HF Transformers (log-probability, float32, {mode})")
    for column in ("model", "layer class", "recipe", *POINTS, "plain", "requests", "start"):
        table.add_column(column, justify="left" if column in ("model", "layer class", "recipe") else "right")
    for report in reports:
        tiny = report.tiny
        cells = ["refused" if point in tiny.refused else _cell(report.worst(point)) for point in POINTS]
        table.add_row(
            tiny.name,
            ", ".join(sorted(report.layers)),
            tiny.recipe,
            *cells,
            _cell(report.worst_plain),
            str(len(report.outcomes)),
            f"{report.start_seconds:.1f} s",
        )
    return table


def figures_of(reports: list[Report], mode: str) -> dict[str, Any]:
    """Return the figures of the table and of captured rows, with the environment of the measurement."""
    import vllm  # not earlier: it reads the environment

    versions = {name: version(name) for name in ("torch", "transformers")}
    environment = {"machine": platform.machine(), "vllm": vllm.__version__, "vllm_steer": __version__, **versions}
    return {
        "environment": environment,
        "mode": mode,
        "tolerance": TOLERANCE,
        "models": [
            {
                "model": report.tiny.name,
                "layer": ", ".join(sorted(report.layers)),
                "requests": len(report.outcomes),
                "plain": report.worst_plain,
                "edits": {p: None if p in report.tiny.refused else report.worst(p) for p in POINTS},
                "rows": {p: report.worst_row(p) for p in POINTS},
            }
            for report in reports
        ],
    }


def _cell(error: float) -> str:
    return f"{error:.1e}" if error < TOLERANCE else f"[red]{error:.1e}[/red]"


def _agrees(report: Report) -> bool:
    return (
        all(outcome.agrees for outcome in report.outcomes)
        and all(outcome.effect > MIN_EFFECT for outcome in report.outcomes if outcome.case.edits)
        and all(refusal.error is not None for refusal in report.refusals)
    )


if __name__ == "__main__":
    typer.run(main)
