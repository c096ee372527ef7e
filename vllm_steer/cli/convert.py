# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer convert``: vector files of other tools as module files, and modules as control vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_steer.cli.output import check_output, failing_on
from vllm_steer.errors import SteeringError


def convert(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A vector file of any tool, or a module's file.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The .safetensors or .gguf file to write.")],
    form: Annotated[
        str | None, typer.Option("--format", help="Format, if the file can mean several things: repeated in errors.")
    ] = None,
    layer: Annotated[
        list[int] | None,
        typer.Option(help="Layer of the file's only vector, or one of its layers to take; repeatable. From 0."),
    ] = None,
    point: Annotated[str | None, typer.Option(help="Hook point, if it is not in the file.")] = None,
) -> None:
    """Convert a vector file. The guide "Vector files" has the formats and the meaning of their layer numbers."""
    from vllm_steer.registry.vector_files import read_vector_file, write_vector_file
    from vllm_steer.vectors import Choice

    check_output(out)
    with failing_on(SteeringError, OSError):
        module, metadata = read_vector_file(source, Choice(form, tuple(layer or ()), point), out)
        write_vector_file(out, module, metadata)
    sites = ", ".join(f"{edit.point} of layer {edit.layers[0]}" for edit in module.base)
    typer.echo(f"{out}: {sites or 'a module'}, width {module.width}, {module.digest}")
