# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer keys``: the API key file of ``--steering-keys``."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from vllm_steer.cli.output import failing_on, group, print_table
from vllm_steer.errors import SteeringError
from vllm_steer.server.auth.rights import RIGHT_DESCRIPTIONS, Right

app = group("API keys of a server, in the file of --steering-keys.")

_RIGHTS = "; ".join(f"{right}: {meaning}" for right, meaning in RIGHT_DESCRIPTIONS.items())

File = Annotated[
    Path,
    typer.Option("--file", "-f", envvar="VLLM_STEER_KEYS", help="Key file; servers reload it when it changes."),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key, shown in logs and errors.")]


@app.command()
def new(
    name: Name,
    file: File,
    right: Annotated[list[Right] | None, typer.Option("--right", "-r", help=f"Repeatable. {_RIGHTS}.")] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option("--limit", "-l", metavar="NAME=N", help="A limit, e.g. steering_requests=8. Repeatable."),
    ] = None,
) -> None:
    """Create a key and print it. The file stores only its hash. A key without rights allows plain requests."""
    from vllm_steer.server.auth.key_file import edit_keys, read_keys
    from vllm_steer.server.auth.keys import generate_key

    with failing_on(SteeringError):
        key, secret = generate_key(name, tuple(dict.fromkeys(right or ())), _parse_limits(limit or []))
        with edit_keys(file, create=True) as write:
            keys = read_keys(file) if file.exists() else ()
            if name in {other.name for other in keys}:
                raise SteeringError("name", f"{file} already has a key {name}; revoke it first or use another name")
            write((*keys, key))
    typer.echo(f"rights of {key.name}: {', '.join(key.rights) or 'none (plain requests only)'}", err=True)
    typer.echo(secret)


@app.command(name="list")
def list_keys(file: File) -> None:
    """List the keys, without secrets."""
    from vllm_steer.server.auth.key_file import read_keys

    with failing_on(SteeringError):
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
    print_table(("name", "rights", "limits", "created"), lines)


@app.command()
def revoke(name: Name, file: File) -> None:
    """Remove a key from the file. Requests that already run with it are not stopped."""
    from vllm_steer.server.auth.key_file import edit_keys, read_keys

    with failing_on(SteeringError), edit_keys(file) as write:
        keys = read_keys(file)
        remaining = tuple(key for key in keys if key.name != name)
        if len(remaining) == len(keys):
            raise SteeringError("name", f"{file} has no key {name}")
        write(remaining)
    typer.echo(f"{name} revoked")


def _parse_limits(texts: list[str]) -> dict[str, int]:
    limits = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not (value.isascii() and value.isdecimal() and len(value) < 20):
            raise typer.BadParameter(f"{text!r} is not a limit; use NAME=N, e.g. steering_requests=8")
        if name in limits:
            raise typer.BadParameter(f"{name} is given twice")
        limits[name] = int(value)
    return limits
