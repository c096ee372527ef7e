# SPDX-License-Identifier: Apache-2.0
"""``python scripts/release_diff.py VERSION``: the work list of a vLLM release."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.releases.open_source import open_source
from scripts.releases.work_list import compare, write_report
from vllm_steer.compat.sources import SourceError

app = typer.Typer(add_completion=False, help="Compare versions of vLLM by their source, without importing them.")


@app.command()
def diff(
    version: Annotated[
        str, typer.Argument(help="Version (pip downloads it), wheel, source archive, folder, or `installed`.")
    ],
    old: Annotated[str, typer.Option(help="What to compare it with; the same forms.")] = "installed",
    source: Annotated[bool, typer.Option(help="Show the difference of every seam.")] = True,
    output: Annotated[Path | None, typer.Option(help="Markdown file to write.")] = None,
) -> None:
    """List the seams, decoder-layer classes and settings that differ, and what has to be proven again."""
    try:
        report = write_report(compare(open_source(old), open_source(version)), with_source=source)
    except SourceError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if output is None:
        typer.echo(report, nl=False)
        return
    try:
        output.write_text(report, encoding="utf-8")
    except OSError as error:
        typer.echo(f"error: {output} cannot be written: {error.strerror or error}", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    app(prog_name="release_diff.py")
