# SPDX-License-Identifier: Apache-2.0
"""Options and error handling of commands that talk to a server."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_steer.cli.output import fail
from vllm_steer.errors import SteeringError

if TYPE_CHECKING:
    from vllm_steer.client import Client

DEFAULT_URL = "http://localhost:8000"
Url = Annotated[str, typer.Option(envvar="VLLM_STEER_URL", help="URL of the server.")]
ApiKey = Annotated[str | None, typer.Option(envvar="VLLM_STEER_API_KEY", help="API key, if the server requires one.")]
Modules = Annotated[list[str] | None, typer.Argument(metavar="MODULE[=SCALE]", help="Modules, e.g. calm or calm=1.5.")]


@contextmanager
def connect(url: str, api_key: str | None) -> Iterator[Client]:
    """Yield a client. Errors end the command with a message and status 1."""
    import httpx

    from vllm_steer.client import Client, Retry, ServerError

    try:
        with Client(url, api_key=api_key, retry=Retry(attempts=3)) as client:
            yield client
    except BrokenPipeError:  # the reader of the output has ended, as with head; click ends without a message
        raise
    except (ServerError, SteeringError, OSError, httpx.TransportError, httpx.InvalidURL) as error:
        raise fail(error) from None
    except ValueError:
        raise fail(f"{url} is not a server with vllm-steer: unexpected response") from None


def parse_modules(words: list[str] | None, default: float | None = 1.0) -> list[tuple[str, float]]:
    """Return ``["calm=1.5", "terse"]`` as names and numbers. Raises ``typer.BadParameter``."""
    modules = []
    for word in words or ():
        name, equals, scale = word.partition("=")
        try:
            number = float(scale) if equals or default is None else default
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise typer.BadParameter(f"{word!r}: {scale!r} is not a finite number") from None
        modules.append((name, number))
    return modules


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ``SteeringError`` for anything else, including duplicate keys."""
    from vllm_steer.request.scalars import parse_json

    body = parse_json(path.read_bytes(), str(path))
    if not isinstance(body, dict):
        raise SteeringError(str(path), "must contain a JSON object")
    return body
