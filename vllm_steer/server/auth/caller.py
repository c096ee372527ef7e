# SPDX-License-Identifier: Apache-2.0
"""Who asks, and what they may do: known wherever a request is worked on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm_steer.server.auth.rights import ForbiddenError, Right

if TYPE_CHECKING:
    from vllm_steer.server.auth.keys import Key

caller: ContextVar[str | None] = ContextVar("vllm_steer_caller", default=None)
"""The name of the key with which the HTTP request that is being answered came; None without a key file, and where no
HTTP request is at work."""

_key: ContextVar[Key | None] = ContextVar("vllm_steer_key", default=None)

NOBODY = b""
"""Whose captures are where there are no keys."""


@contextmanager
def acting(key: Key | None) -> Iterator[None]:
    """Within it, ``key`` is the one that asks."""
    tokens = caller.set(None if key is None else key.name), _key.set(key)
    try:
        yield
    finally:
        caller.reset(tokens[0])
        _key.reset(tokens[1])


def current_key() -> Key | None:
    """The key that asks; None where there is no key file."""
    return _key.get()


def require(*rights: Right, field: str = "authorization") -> None:
    """Raise ForbiddenError unless whoever asks may do all of this; without a key file, everybody may."""
    key = _key.get()
    for right in rights:
        if key is not None and right not in key.rights:
            raise ForbiddenError(field, f"takes the right {right.value}, which the key {key.name} does not have")


def require_fields(names: Iterable[str]) -> None:
    """As `require`, for steering and capture fields of a body."""
    for name in names:
        require(Right.CAPTURE if name == "capture" else Right.STEER, field=name)


def owner() -> bytes:
    """Whose what is stored now is: not the name, which another key may have later."""
    key = _key.get()
    return NOBODY if key is None else bytes.fromhex(key.sha256)


def salt_request(_output_processor: Any, request: Any) -> None:
    """Restrict an engine request, steered or not, to the prefix cache of its API key."""
    key = _key.get()
    if key is not None and key.cache_salt:
        request.cache_salt = key.salt(request.cache_salt)
