# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer set`` and ``status``: what a server applies to every request."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_steer.cli.connection import URL, ApiKey, Modules, Url, connected, references
from vllm_steer.cli.modules import print_content
from vllm_steer.cli.output import print_table

if TYPE_CHECKING:
    from vllm_steer.registry.schema import GlobalSteering

Body = Annotated[Path | None, typer.Option("--file", help="The body of POST /v1/steering/set, in JSON.")]
Replace = Annotated[bool, typer.Option("--replace", help="Clear everything that is not named.")]
Clear = Annotated[bool, typer.Option("--clear", help="Clear everything.")]


def set_steering(
    modules: Modules = None,
    file: Body = None,
    replace: Replace = False,
    clear: Clear = False,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """Steer every request that a server admits from now on."""
    from vllm_steer.errors import SteeringError
    from vllm_steer.registry.strict_json import parse_json

    named = references(modules)
    if clear and (named or file is not None or replace):
        raise typer.BadParameter("--clear goes with nothing else")
    with connected(url, api_key) as client:
        if clear:
            _print(client.clear())
            return
        body: Any = {} if file is None else parse_json(file.read_bytes(), str(file))
        if not isinstance(body, dict):
            raise SteeringError(str(file), "is no JSON object")
        for key, given in {"modules": named, "replace": replace}.items():
            if given and body.get(key) not in (None, given):
                raise SteeringError(key, f"stands in {file} and on the command line; one of them would be ignored")
            if given:
                body[key] = given
        _print(client.set(**body))


def status(url: Url = URL, api_key: ApiKey = None) -> None:
    """Show what a server serves, and what it applies to every request."""
    with connected(url, api_key) as client:
        typer.echo(f"model: {client.model}")
        typer.echo(f"modules: {', '.join(each.name for each in client.list().data) or 'none'}")
        _print(client.status())


def _print(found: GlobalSteering) -> None:
    typer.echo(f"epoch: {found.epoch}")
    typer.echo(f"global steering: {found.digest or 'none'}")
    if found.modules:
        lines = ((use.name or "", use.digest[:19], f"{use.scale:g}") for use in found.modules)
        print_table(("module", "digest", "scale"), lines)
    print_content(found.content)
