# SPDX-License-Identifier: Apache-2.0
"""Commands that talk to a server: where it is, and how its refusals are shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vllm_steer.client import Client

Url = Annotated[str, typer.Option(envvar="VLLM_STEER_URL", help="The server.")]
ApiKey = Annotated[str | None, typer.Option(envvar="VLLM_STEER_API_KEY", help="Its key, if it wants one.")]
Modules = Annotated[list[str] | None, typer.Argument(metavar="MODULE[=SCALE]", help="Modules, e.g. calm or calm=1.5.")]
URL = "http://localhost:8000"


@contextmanager
def connected(url: str, api_key: str | None) -> Iterator[Client]:
    """A client; what goes wrong ends the command with a sentence and status 1."""
    import httpx

    from vllm_steer.client import Client, Retry, ServerError
    from vllm_steer.errors import SteeringError

    try:
        with Client(url, api_key=api_key, retry=Retry(attempts=3)) as client:
            yield client
    except httpx.TransportError as error:
        typer.echo(f"error: {url} cannot be reached: {error}", err=True)
        raise typer.Exit(1) from None
    except (ServerError, SteeringError, OSError, httpx.InvalidURL) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except ValueError:
        typer.echo(f"error: {url} answers, but not as a server with vllm-steer does", err=True)
        raise typer.Exit(1) from None


def references(modules: list[str] | None) -> list[tuple[str, float]]:
    """``calm=1.5`` as a module and its scale; raises ``typer.BadParameter``."""
    found = []
    for text in modules or ():
        name, equals, scale = text.partition("=")
        try:
            found.append((name, float(scale) if equals else 1.0))
        except ValueError:
            raise typer.BadParameter(f"{text!r}: {scale!r} is no number") from None
    return found
