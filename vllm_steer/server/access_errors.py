# SPDX-License-Identifier: Apache-2.0
"""Errors for valid requests that the client may not make, or not now."""

from __future__ import annotations

from vllm_steer.errors import SteeringError


class AccessError(SteeringError):
    """Base class of authentication, authorization and limit errors."""


class UnauthorizedError(AccessError):
    """The request has no valid API key."""


class ForbiddenError(AccessError):
    """The API key lacks a right that the request requires."""


class TooLargeError(AccessError):
    """A single request exceeds a limit."""


class KeyLimitError(AccessError):
    """The requests of one API key together would exceed a limit; retry after `Retry-After` seconds."""

    def __init__(self, field: str, problem: str, retry_after: int = 1) -> None:
        super().__init__(field, problem)
        self.retry_after = retry_after
        """Value of the ``Retry-After`` header in seconds."""


class ServerFullError(AccessError):
    """The requests of all keys together would exceed a limit; retry after `Retry-After` seconds."""


class DrainingError(AccessError):
    """The server is shutting down and finishes the requests that it has."""

    retry_after = 5
