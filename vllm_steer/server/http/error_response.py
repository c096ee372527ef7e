# SPDX-License-Identifier: Apache-2.0
"""HTTP status and body of every error that this package returns, in the form of OpenAI's API."""

from __future__ import annotations

from http import HTTPStatus

from starlette.responses import JSONResponse

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.live import EndedRequestError, UnknownRequestError
from vllm_steer.log import LimitedLog, steering_logger
from vllm_steer.metrics.requests import count_refusal
from vllm_steer.registry.errors import FIELD as REGISTRY_FIELD
from vllm_steer.registry.errors import RegistryFullError, RegistryUnavailableError, UnknownModuleError
from vllm_steer.registry.schema import ErrorAnswer, ErrorDetail
from vllm_steer.server.access_errors import (
    DrainingError,
    ForbiddenError,
    KeyLimitError,
    ServerFullError,
    TooLargeError,
    UnauthorizedError,
)

server_errors = LimitedLog(steering_logger(__name__))
RETRY_SECONDS = 1
"""Default of the ``Retry-After`` header."""


class UnknownCaptureError(SteeringError):
    """No stored capture of the caller has this id."""


class BodyTooLargeError(TooLargeError):
    """The body exceeds the server's limit."""


class MediaTypeError(SteeringError):
    """The route does not accept the body's media type."""


class StudyFailedError(SteeringError):
    """A run of a patching study that all cells depend on failed in the engine."""


ERRORS: tuple[tuple[type[SteeringError], HTTPStatus, str], ...] = (
    (UnauthorizedError, HTTPStatus.UNAUTHORIZED, "UnauthorizedError"),
    (ForbiddenError, HTTPStatus.FORBIDDEN, "ForbiddenError"),
    (UnknownModuleError, HTTPStatus.NOT_FOUND, "NotFoundError"),
    (UnknownCaptureError, HTTPStatus.NOT_FOUND, "NotFoundError"),
    (UnknownRequestError, HTTPStatus.NOT_FOUND, "NotFoundError"),
    (EndedRequestError, HTTPStatus.CONFLICT, "ConflictError"),
    (BodyTooLargeError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "RequestEntityTooLargeError"),
    (TooLargeError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "RequestEntityTooLargeError"),
    (KeyLimitError, HTTPStatus.TOO_MANY_REQUESTS, "TooManyRequestsError"),
    (DrainingError, HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError"),
    (ServerFullError, HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError"),
    (RegistryUnavailableError, HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError"),
    (RegistryFullError, HTTPStatus.INSUFFICIENT_STORAGE, "InsufficientStorageError"),
    (StudyFailedError, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"),
    (MediaTypeError, HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaTypeError"),
    (SteeringError, HTTPStatus.BAD_REQUEST, "BadRequestError"),
)
"""Status and OpenAI error type by exception class; subclasses come before their bases."""


def error_status(error: SteeringError) -> tuple[HTTPStatus, str]:
    """Return the HTTP status and the OpenAI error type of ``error``."""
    return next((status, kind) for cls, status, kind in ERRORS if isinstance(error, cls))


def error_response(error: SteeringError) -> JSONResponse:
    """Return the response to a refused request, and count the refusal.

    All HTTP errors of this package are created here.
    """
    status, kind = error_status(error)
    # The field of unreadable registry content is a digest; count it under the registry.
    count_refusal(status.value, REGISTRY_FIELD if isinstance(error, RegistryUnavailableError) else error.field)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, DrainingError):
        server_errors.error(f"{status.value} {kind}", "HTTP %d: %s", status.value, error)
    message = str(error)
    if isinstance(error, RegistryUnavailableError):  # the whole message names hosts, databases and paths
        message = f"{error.field}: {error.public_problem}"
    detail = ErrorDetail(message=message, type=kind, param=error.field, code=status.value)
    headers = {}
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        headers["retry-after"] = str(getattr(error, "retry_after", RETRY_SECONDS))
    if status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(ErrorAnswer(error=detail).model_dump(), status_code=status.value, headers=headers)
