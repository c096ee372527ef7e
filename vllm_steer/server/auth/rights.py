# SPDX-License-Identifier: Apache-2.0
"""What a key may be allowed; nothing of a server is loaded to read this."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from vllm_steer.errors import SteeringError


class Right(StrEnum):
    """One thing that a key may be allowed. Every route of ours states one, in the OpenAPI document as well."""

    READ = "read"
    DATA = "data"
    STEER = "steer"
    CAPTURE = "capture"
    REGISTER = "register"
    GLOBAL = "global"
    ADMIN = "admin"


MEANING: Mapping[Right, str] = MappingProxyType(
    {
        Right.READ: "see which modules there are, what is applied to everybody, and what the engine serves",
        Right.DATA: "with `read`: see the vectors themselves (`?data=true`)",
        Right.STEER: "steer one's own requests, with vectors of one's own or with modules by name",
        Right.CAPTURE: "read rows in one's own requests, also projected on named probes, and fetch them",
        Right.REGISTER: "register, replace and delete modules, which are everybody's",
        Right.GLOBAL: "change what is applied to every request of everybody",
        Right.ADMIN: "use vLLM's routes that change the server: sleep, LoRA adapters, weights, profiles",
    }
)


class AccessError(SteeringError):
    """Nothing is wrong with the request; its caller may not make it, or not now."""


class UnauthorizedError(AccessError):
    """No key that this server knows came with the request."""


class ForbiddenError(AccessError):
    """The key has not the right that the request takes."""


class TooLargeError(AccessError):
    """One request would take more than a limit allows."""


class KeyLimitError(AccessError):
    """The key's other requests have taken up what a limit allows it; `Retry-After` says when to come again."""

    def __init__(self, field: str, problem: str, retry_after: int = 1) -> None:
        super().__init__(field, problem)
        self.retry_after = retry_after
        """In seconds."""


class ServerFullError(AccessError):
    """The requests of all keys have taken up what a limit allows; `Retry-After` says when to come again."""
