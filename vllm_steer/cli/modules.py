# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer modules``: the named modules of a server."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_steer.cli.connection import URL, ApiKey, Url, connected
from vllm_steer.cli.output import print_table, printable

if TYPE_CHECKING:
    from vllm_steer.registry.schema import Content, ModuleInfo

app = typer.Typer(
    help="List, look at, add and remove the named modules of a server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Reference = Annotated[str, typer.Argument(metavar="NAME", help="A name, or name@sha256:... for one version.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON in place of a table.")]


@app.command()
def ls(url: Url = URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List the modules."""
    with connected(url, api_key) as client:
        found = client.list()
        if as_json:
            typer.echo(found.model_dump_json())
            return
        columns = ("name", "digest", "versions", "registered", "KiB", "model", "description")
        print_table(columns, (_line(each) for each in found.data))


@app.command()
def show(name: Reference, url: Url = URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Show what a module edits."""
    with connected(url, api_key) as client:
        found = client.get(name)
        if as_json:
            typer.echo(found.model_dump_json())
            return
        for key in ("name", "digest", "description", "model", "problem"):
            if getattr(found, key):
                typer.echo(f"{key}: {printable(str(getattr(found, key)))}")
        for key, text in found.provenance.items():
            typer.echo(f"{printable(key)}: {printable(text)}")
        typer.echo(f"versions: {', '.join(found.versions)}")
        if found.probes:
            typer.echo(f"probes: {', '.join(found.probes)} ({found.width} wide)")
        print_content(found.content)


@app.command()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What requests are to call it.")],
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .safetensors file, or the body of a request in JSON.")
    ],
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """Register a module, or a new version of it."""
    from vllm_steer.errors import SteeringError
    from vllm_steer.registry.strict_json import parse_json

    with connected(url, api_key) as client:
        if path.suffix == ".json":
            body = parse_json(path.read_bytes(), str(path))
            if not isinstance(body, dict):
                raise SteeringError(str(path), "is no JSON object")
            if body.get("name") not in (None, name):
                raise SteeringError("name", f"is {name} on the command line, and another one in {path}")
            found = client.register(**{**body, "name": name})
        else:
            found = client.register_file(name, path)
        typer.echo(f"{found.name}@{found.digest} (epoch {found.epoch})")


@app.command()
def rm(name: Reference, url: Url = URL, api_key: ApiKey = None) -> None:
    """Delete a module, or one version of it; requests that run with it keep it."""
    with connected(url, api_key) as client:
        found = client.delete(name)
        typer.echo(f"{len(found.deleted)} deleted of {found.name} (epoch {found.epoch})")


def print_content(content: Content) -> None:
    """A line for each place that is edited."""
    lines = [
        (tier, point, ", ".join(map(str, layers)), "add")
        for tier, points in content.tiers.items()
        for point, layers in points.items()
    ]
    lines += [("edits", "", "", edit) for edit in content.edits]
    if lines:
        print_table(("tier", "point", "layers", "edit"), lines)


def _line(info: ModuleInfo) -> tuple[object, ...]:
    when = datetime.fromtimestamp(info.registered, UTC).strftime("%Y-%m-%d %H:%M")
    size = f"{info.content.num_bytes / 1024:.1f}" if info.problem is None else "damaged"
    return (info.name, info.digest[:19], len(info.versions), when, size, info.model or "", info.description)
