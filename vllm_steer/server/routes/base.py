# SPDX-License-Identifier: Apache-2.0
"""What every route of ours passes through: its right, its body, its errors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from vllm_steer import audit
from vllm_steer.errors import SteeringError
from vllm_steer.metrics.requests import count_refusal
from vllm_steer.registry.directory import FIELD as REGISTRY_FIELD
from vllm_steer.registry.errors import RegistryFullError, RegistryUnavailableError, UnknownModuleError
from vllm_steer.registry.schema import ErrorAnswer, ErrorDetail
from vllm_steer.server.access_errors import (
    ForbiddenError,
    KeyLimitError,
    ServerFullError,
    TooLargeError,
    UnauthorizedError,
)
from vllm_steer.server.auth.current_key import current_key_name, require
from vllm_steer.server.auth.rights import Right as Right

OWN_PREFIX = "/v1/steering/"
OWN_PREFIXES = (OWN_PREFIX, "/v1/captures/")
RIGHT_KEY = "x-steering-right"
RETRY_SECONDS = 1


class UnknownCaptureError(SteeringError):
    """No capture goes by that id: it has expired, was deleted, or never was this caller's."""


class BodyTooLargeError(TooLargeError):
    """A body is over the server's limit."""


class MediaTypeError(SteeringError):
    """A body is of a type that the route does not take."""


# By class, the more special ones first.
ERRORS: tuple[tuple[type[SteeringError], HTTPStatus, str], ...] = (
    (UnauthorizedError, HTTPStatus.UNAUTHORIZED, "UnauthorizedError"),
    (ForbiddenError, HTTPStatus.FORBIDDEN, "ForbiddenError"),
    (UnknownModuleError, HTTPStatus.NOT_FOUND, "NotFoundError"),
    (UnknownCaptureError, HTTPStatus.NOT_FOUND, "NotFoundError"),
    (BodyTooLargeError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "RequestEntityTooLargeError"),
    (TooLargeError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "RequestEntityTooLargeError"),
    (KeyLimitError, HTTPStatus.TOO_MANY_REQUESTS, "TooManyRequestsError"),
    (ServerFullError, HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError"),
    (RegistryUnavailableError, HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError"),
    (RegistryFullError, HTTPStatus.INSUFFICIENT_STORAGE, "InsufficientStorageError"),
    (MediaTypeError, HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaTypeError"),
    (SteeringError, HTTPStatus.BAD_REQUEST, "BadRequestError"),
)

# For the OpenAPI document.
RESPONSES: dict[int | str, dict[str, Any]] = {
    status.value: {"model": ErrorAnswer, "description": status.phrase} for _, status, _ in ERRORS
}


class SteeringRoute(APIRoute):
    """A route that asks for its right, and whose errors are answered in OpenAI's form."""

    @property
    def right(self) -> Right:
        """The right that a caller needs."""
        return Right((self.openapi_extra or {})[RIGHT_KEY])

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind the right that the route states; without one, no server starts with it."""
        handle, right = super().get_route_handler(), self.right

        async def answer(request: Request) -> Response:
            address = None if request.client is None else request.client.host
            try:
                require(right)
                with audit.attribute_to(current_key_name() or audit.ANONYMOUS, address):
                    return await handle(request)
            except SteeringError as error:
                return refusal(error)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody is there to read it

        return answer


def status_of(error: SteeringError) -> tuple[HTTPStatus, str]:
    """How an error is answered: the status, and the name of its kind."""
    return next((status, kind) for cls, status, kind in ERRORS if isinstance(error, cls))


def refusal(error: SteeringError) -> JSONResponse:
    """The answer that says what is wrong. Every refusal that this package makes over HTTP is made and counted here."""
    status, kind = status_of(error)
    # Content that cannot be read goes by its digest, and is the registry's trouble all the same.
    count_refusal(status.value, REGISTRY_FIELD if isinstance(error, RegistryUnavailableError) else error.field)
    detail = ErrorDetail(message=str(error), type=kind, param=error.field, code=status.value)
    headers = {}
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        headers["retry-after"] = str(getattr(error, "retry_after", RETRY_SECONDS))
    if status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(ErrorAnswer(error=detail).model_dump(), status_code=status.value, headers=headers)


def path_of(scope: Scope) -> str:
    """The path of a request below the application's root."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def needs(right: Right, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a route says of itself in the OpenAPI document: its right, and the form of its body."""
    return {RIGHT_KEY: right.value} | ({"requestBody": body} if body else {})


async def read_body(request: Request, limit: int) -> bytes:
    """The body, no more than ``limit`` bytes of it in memory; raises BodyTooLargeError."""
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            pieces.clear()  # and read on: a client that is still writing would not see the answer
        else:
            pieces.append(piece)
    if size > limit:
        raise BodyTooLargeError("body", f"has over {limit >> 20} MiB, the limit (--steering-max-body-mib)")
    return b"".join(pieces)
