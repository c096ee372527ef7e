# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer modules``: list, show, add, export and delete named modules of a server."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_steer.cli.connection import DEFAULT_URL, ApiKey, Url, connect
from vllm_steer.cli.output import check_output, group, print_table, printable
from vllm_steer.errors import SteeringError

if TYPE_CHECKING:
    from vllm_steer.registry.schema import Content, ModuleInfo

app = group("List, show, add, export and delete named modules of a server.")

Reference = Annotated[str, typer.Argument(metavar="NAME", help="A name, or name@sha256:... for one version.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def ls(url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List the modules."""
    with connect(url, api_key) as client:
        modules = client.list()
        if as_json:
            typer.echo(modules.model_dump_json())
            return
        columns = ("name", "digest", "versions", "registered", "KiB", "model", "description")
        print_table(columns, (_table_row(module) for module in modules.data))


@app.command()
def show(name: Reference, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Show a module's edits and probes."""
    from vllm_steer.registry.schema import ProbeInfo

    with connect(url, api_key) as client:
        module = client.get(name)
        if as_json:
            typer.echo(module.model_dump_json())
            return
        for key in ("name", "digest", "description", "model", "problem"):
            if getattr(module, key):
                typer.echo(f"{key}: {printable(str(getattr(module, key)))}")
        for key, text in module.provenance.items():
            typer.echo(f"{printable(key)}: {printable(text)}")
        typer.echo(f"versions: {', '.join(module.versions)}")
        if module.probes:
            typer.echo(f"probes, {module.width} wide:")
            probes = ((probe, *info.model_dump().values()) for probe, info in module.content.probes.items())
            cells = (tuple("" if cell is None else cell for cell in line) for line in probes)
            print_table(("probe", *ProbeInfo.model_fields), cells)
        print_content(module.content)
        if module.streams:
            lines = ((each.point, each.layer, f"{each.length:.4g}", f"{each.strength:.4g}") for each in module.streams)
            print_table(("point", "layer", "length of the stream", "strength of dose 1"), lines)


@app.command()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name that requests use.")],
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="A module's file, a vector file of another tool, or a request body.")
    ],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Register a module, or a new version of it."""
    from vllm_steer.registry.vector_files import module_body
    from vllm_steer.vectors.containers import kind_of, open_container

    with connect(url, api_key) as client:
        data = path.read_bytes()
        body = module_body(open_container(data)) if kind_of(data) == "json" else None
        if body is not None:
            if body.get("name") not in (None, name):
                raise SteeringError("name", f"{name} on the command line differs from the name in {path}")
            module = client.register(**{**body, "name": name})
        else:
            module = client.register_file(name, data)
        typer.echo(f"{module.name}@{module.digest} (epoch {module.epoch})")


@app.command()
def export(
    name: Reference,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The .safetensors file to write.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Write a module to a file, from which `add` registers it again with the same digest."""
    check_output(path)
    with connect(url, api_key) as client:
        module = client.get(name, data=True)
        module.save(path)
        typer.echo(f"{module.name}@{module.digest} written to {path}")


@app.command()
def rm(name: Reference, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Delete a module, or one version of it. Running requests are not affected."""
    with connect(url, api_key) as client:
        deleted = client.delete(name)
        typer.echo(f"{deleted.name}: {len(deleted.deleted)} versions deleted (epoch {deleted.epoch})")


def print_content(content: Content) -> None:
    """Print one line per edited place."""
    lines = [
        (tier, point, ", ".join(map(str, layers)), "add")
        for tier, points in content.tiers.items()
        for point, layers in points.items()
    ]
    lines += [("edits", "", "", edit) for edit in content.edits]
    if lines:
        print_table(("part", "point", "layers", "edit"), lines)


def _table_row(module: ModuleInfo) -> tuple[object, ...]:
    registered = datetime.fromtimestamp(module.registered, UTC).strftime("%Y-%m-%d %H:%M")
    size = f"{module.content.num_bytes / 1024:.1f}" if module.problem is None else "damaged"
    digest, model = module.digest[:19], module.model or ""
    return (module.name, digest, len(module.versions), registered, size, model, module.description)
