# SPDX-License-Identifier: Apache-2.0
"""Commands for modules, ``vllm-steer modules`` and ``convert``, and for global steering, ``set`` and ``status``."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_steer.cli.connection import DEFAULT_URL, ApiKey, Modules, Url, connect, parse_modules, read_json_object
from vllm_steer.cli.output import check_outputs, failing_on, group, print_table, printable
from vllm_steer.errors import SteeringError

if TYPE_CHECKING:
    from vllm_steer.registry.schema import Content, GlobalSteering, ModuleInfo


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
    check_outputs(path)
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
            _print_steering(client.clear())
            return
        body = {} if file is None else read_json_object(file)
        for key, given in {"modules": references, "replace": replace}.items():
            if given and body.get(key) not in (None, given):
                raise SteeringError(key, f"differs between {file} and the command line; give it once")
            if given:
                body[key] = given
        _print_steering(client.set(**body))


def status(url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Show a server's model, modules, the lengths of the stream that they tell, and global steering."""
    with connect(url, api_key) as client:
        typer.echo(f"model: {client.model}")
        modules = client.list().data
        typer.echo(f"modules: {', '.join(module.name for module in modules) or 'none'}")
        if told := [(each.point, each.layer, f"{each.length:.4g}", of.name) for of in modules for each in of.streams]:
            print_table(("point", "layer", "length of the stream", "told by"), sorted(told))
        _print_steering(client.status())


def _print_steering(steering: GlobalSteering) -> None:
    typer.echo(f"epoch: {steering.epoch}")
    typer.echo(f"global steering: {steering.digest or 'none'}")
    if steering.modules:
        amounts = [(f"{use.scale:g}", "") if use.dose is None else ("", f"{use.dose:g}") for use in steering.modules]
        lines = ((use.name or "", use.digest[:19], *amounts[i]) for i, use in enumerate(steering.modules))
        print_table(("module", "digest", "scale", "dose"), lines)
    print_content(steering.content)


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

    check_outputs(out)
    with failing_on(SteeringError, OSError):
        module, metadata = read_vector_file(source, Choice(form, tuple(layer or ()), point), out)
        write_vector_file(out, module, metadata)
    sites = ", ".join(f"{edit.point} of layer {edit.layers[0]}" for edit in module.base)
    typer.echo(f"{out}: {sites or 'a module'}, width {module.width}, {module.digest}")
