# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer set`` and ``status``: global steering of a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_steer.cli.connection import DEFAULT_URL, ApiKey, Modules, Url, connect, parse_modules, read_json_object
from vllm_steer.cli.modules import print_content
from vllm_steer.cli.output import print_table

if TYPE_CHECKING:
    from vllm_steer.registry.schema import GlobalSteering

Body = Annotated[Path | None, typer.Option("--file", help="Body of POST /v1/steering/set, in JSON.")]
Replace = Annotated[bool, typer.Option("--replace", help="Clear everything that is not given.")]
Clear = Annotated[bool, typer.Option("--clear", help="Clear everything.")]


def set_steering(
    modules: Modules = None,
    file: Body = None,
    replace: Replace = False,
    clear: Clear = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Steer every request that the server admits from now on."""
    from vllm_steer.errors import SteeringError

    references = parse_modules(modules)
    if clear and (references or file is not None or replace):
        raise typer.BadParameter("--clear cannot be combined with other arguments")
    with connect(url, api_key) as client:
        if clear:
            _print(client.clear())
            return
        body = {} if file is None else read_json_object(file)
        for key, given in {"modules": references, "replace": replace}.items():
            if given and body.get(key) not in (None, given):
                raise SteeringError(key, f"differs between {file} and the command line; give it once")
            if given:
                body[key] = given
        _print(client.set(**body))


def status(url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Show a server's model, modules and global steering."""
    with connect(url, api_key) as client:
        typer.echo(f"model: {client.model}")
        typer.echo(f"modules: {', '.join(module.name for module in client.list().data) or 'none'}")
        _print(client.status())


def _print(steering: GlobalSteering) -> None:
    typer.echo(f"epoch: {steering.epoch}")
    typer.echo(f"global steering: {steering.digest or 'none'}")
    if steering.modules:
        uses = steering.modules
        doses = ["" if use.dose is None else f"{use.dose:g}" for use in uses]
        lines = (
            (use.name or "", use.digest[:19], f"{use.scale:g}", dose) for use, dose in zip(uses, doses, strict=True)
        )
        print_table(("module", "digest", "scale", "dose"), lines)
    print_content(steering.content)
