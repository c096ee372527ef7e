# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer set`` and ``status``: global steering of a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_steer.cli.connection import DEFAULT_URL, ApiKey, Modules, Url, connect, parse_modules, read_json_object
from vllm_steer.cli.modules import print_content
from vllm_steer.cli.output import print_table
from vllm_steer.errors import SteeringError

if TYPE_CHECKING:
    from vllm_steer.registry.schema import GlobalSteering

Body = Annotated[Path | None, typer.Option("--file", help="Body of POST /v1/steering/set, in JSON.")]
Doses = Annotated[
    list[str] | None,
    typer.Option("--dose", metavar="MODULE=DOSE", help="Module and its dose, after the others; repeatable."),
]
Replace = Annotated[bool, typer.Option("--replace", help="Clear everything that is not given.")]
Clear = Annotated[bool, typer.Option("--clear", help="Clear everything.")]


def set_steering(
    modules: Modules = None,
    dose: Doses = None,
    file: Body = None,
    replace: Replace = False,
    clear: Clear = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Steer every request that the server admits from now on."""
    references: list[Any] = [*parse_modules(modules)]
    references += [{"module": name, "dose": number} for name, number in parse_modules(dose, default=None)]
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
    """Show a server's model, modules, the lengths of the stream that they tell, and global steering."""
    with connect(url, api_key) as client:
        typer.echo(f"model: {client.model}")
        modules = client.list().data
        typer.echo(f"modules: {', '.join(module.name for module in modules) or 'none'}")
        if told := [(each.point, each.layer, f"{each.length:.4g}", of.name) for of in modules for each in of.streams]:
            print_table(("point", "layer", "length of the stream", "told by"), sorted(told))
        _print(client.status())


def _print(steering: GlobalSteering) -> None:
    typer.echo(f"epoch: {steering.epoch}")
    typer.echo(f"global steering: {steering.digest or 'none'}")
    if steering.modules:
        amounts = [(f"{use.scale:g}", "") if use.dose is None else ("", f"{use.dose:g}") for use in steering.modules]
        lines = ((use.name or "", use.digest[:19], *amounts[i]) for i, use in enumerate(steering.modules))
        print_table(("module", "digest", "scale", "dose"), lines)
    print_content(steering.content)
