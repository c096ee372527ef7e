# SPDX-License-Identifier: Apache-2.0
"""Base of this package's routes: permission check, body limit, error responses."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from vllm_steer import audit
from vllm_steer.errors import SteeringError
from vllm_steer.registry.schema import ErrorAnswer
from vllm_steer.request.scalars import parse_json, shown
from vllm_steer.server.auth.current_key import current_key_name, require
from vllm_steer.server.auth.rights import Right
from vllm_steer.server.http.error_response import ERRORS, BodyTooLargeError, MediaTypeError, error_response

T = TypeVar("T")
STEERING_PREFIX = "/v1/steering/"
PATCH_SWEEP_ROUTE = "/v1/patch_sweep"
OWN_BODY_PREFIXES = (STEERING_PREFIX, PATCH_SWEEP_ROUTE)
"""Paths of routes that check their bodies themselves."""
PLUGIN_PREFIXES = (*OWN_BODY_PREFIXES, "/v1/captures/")
RESERVATION_KEY = "vllm_steer.reservation"
"""Key of the ASGI scope with the request's :class:`~vllm_steer.server.quota.tracker.Reservation`."""
COUNTED_KEY = "vllm_steer.counted"
"""Key of the ASGI scope of a request that another middleware makes for one that is counted already."""
RIGHT_KEY = "x-steering-right"

RESPONSES: dict[int | str, dict[str, Any]] = {
    status.value: {"model": ErrorAnswer, "description": status.phrase} for _, status, _ in ERRORS
}
"""Error responses for the OpenAPI document."""


class SteeringRoute(APIRoute):
    """A route that requires a right of the caller and returns errors in OpenAI's form."""

    @property
    def right(self) -> Right:
        """Right that the caller needs. Raises ``KeyError`` if the route declares none, so the server does not start."""
        return Right((self.openapi_extra or {})[RIGHT_KEY])

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler in the permission check and error handling."""
        handle, right = super().get_route_handler(), self.right

        async def checked(request: Request) -> Response:
            address = None if request.client is None else request.client.host
            try:
                require(right)
                with audit.attribute_to(current_key_name() or audit.ANONYMOUS, address):
                    return await handle(request)
            except SteeringError as error:
                return error_response(error)
            except ClientDisconnect:
                return Response(status_code=499)  # never sent

        return checked


def state_of(app: FastAPI, name: str, make: Callable[[], T]) -> T:
    """Return the object that a server has under ``name``, which the first call makes."""
    if not hasattr(app.state, name):
        setattr(app.state, name, make())
    found: T = getattr(app.state, name)
    return found


def app_path(scope: Scope) -> str:
    """Return the request's path without the application's root path, as the router finds it."""
    path: str = scope["path"]
    rest = path.removeprefix(scope.get("root_path", ""))
    return rest if rest[:1] in ("/", "") else path  # a root path of "/" is no prefix


def requires(right: Right, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a route's ``openapi_extra``: the right that it requires, and the schema of its body."""
    return {RIGHT_KEY: right.value} | ({"requestBody": body} if body else {})


def check_media_type(request: Request, *allowed: str) -> str:
    """Return the media type of the body; raise ``MediaTypeError`` for others than ``allowed``."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in allowed:
        raise MediaTypeError("content-type", f"must be {' or '.join(allowed)}, not {shown(media_type)}")
    return media_type


def read_object(body: bytes, example: str = "") -> dict[str, Any]:
    """Return the JSON object in a body; raise ``SteeringError`` for anything else."""
    fields = parse_json(body, "body")
    if not isinstance(fields, dict):
        raise SteeringError("body", f"must be a JSON object{example}, not {shown(fields)}")
    return fields


async def read_body(request: Request, limit: int) -> bytes:
    """Read the body, keeping at most ``limit`` bytes in memory. Raises ``BodyTooLargeError``."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            chunks.clear()  # Keep reading: a client that is still sending does not see the response.
        else:
            chunks.append(chunk)
    if size > limit:
        most = f"{limit >> 20} MiB; raise --steering-max-body-mib" if limit >= 1 << 20 else f"{limit >> 10} KiB"
        raise BodyTooLargeError("body", f"exceeds {most}")
    return b"".join(chunks)
