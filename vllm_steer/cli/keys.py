# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer keys``: the file of API keys of ``--steering-keys``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from vllm_steer.cli.output import print_table
from vllm_steer.errors import SteeringError
from vllm_steer.server.auth.rights import RIGHT_DESCRIPTIONS, Right

app = typer.Typer(help="API keys of a server, in the file of --steering-keys.", no_args_is_help=True)

File = Annotated[
    Path, typer.Option("--file", "-f", envvar="VLLM_STEER_KEYS", help="The file; a server reads it when it changes.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is, for logs and limits.")]


@app.command()
def new(
    name: Name,
    file: File,
    right: Annotated[
        list[Right] | None,
        typer.Option(
            "--right",
            "-r",
            help="Repeatable. " + "; ".join(f"{name}: {text}" for name, text in RIGHT_DESCRIPTIONS.items()) + ".",
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit", "-l", metavar="NAME=N", help="A limit of its own, e.g. steering_requests=8. Repeatable."
        ),
    ] = None,
) -> None:
    """Make a key and print it, this once: the file has only its hash. Without rights it may ask for plain answers."""
    from vllm_steer.server.auth.key_file import edit_keys, read_keys
    from vllm_steer.server.auth.keys import generate_key

    with _sentences():
        key, secret = generate_key(name, tuple(dict.fromkeys(right or ())), _limits(limit or []))
        with edit_keys(file, create=True) as write:
            keys = read_keys(file) if file.exists() else ()
            if name in {each.name for each in keys}:
                raise SteeringError("name", f"there is a key {name} in {file}; revoke it first, or take another name")
            write((*keys, key))
    typer.echo(f"{key.name} may: {', '.join(key.rights) or 'nothing but plain requests'}", err=True)
    typer.echo(secret)


@app.command(name="list")
def list_keys(file: File) -> None:
    """List the keys, without anything that is secret."""
    from vllm_steer.server.auth.key_file import read_keys

    with _sentences():
        keys = read_keys(file)
    lines = [
        (
            key.name,
            ", ".join(key.rights),
            ", ".join(f"{name}={value}" for name, value in key.limits.items()),
            datetime.fromtimestamp(key.created, UTC).strftime("%Y-%m-%d %H:%M"),
        )
        for key in keys
    ]
    print_table(("name", "rights", "limits", "made"), lines)


@app.command()
def revoke(name: Name, file: File) -> None:
    """Take a key out of the file: no request is let in with it any more. Those that run go on to their end."""
    from vllm_steer.server.auth.key_file import edit_keys, read_keys

    with _sentences(), edit_keys(file) as write:
        keys = read_keys(file)
        left = tuple(key for key in keys if key.name != name)
        if len(left) == len(keys):
            raise SteeringError("name", f"there is no key {name} in {file}")
        write(left)
    typer.echo(f"{name} revoked")


@contextmanager
def _sentences() -> Iterator[None]:
    """What is wrong ends the command with a sentence and status 1."""
    try:
        yield
    except SteeringError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def _limits(texts: list[str]) -> dict[str, int]:
    limits = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not (value.isascii() and value.isdecimal() and len(value) < 20):
            raise typer.BadParameter(f"{text!r} is no limit; write NAME=N, e.g. steering_requests=8")
        if name in limits:
            raise typer.BadParameter(f"{name} is there twice, and one would be ignored")
        limits[name] = int(value)
    return limits
