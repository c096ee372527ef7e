# SPDX-License-Identifier: Apache-2.0
"""The API key of the request that the current task serves, and the checks and values that depend on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm_steer.server.access_errors import ForbiddenError
from vllm_steer.server.auth.rights import Right

if TYPE_CHECKING:
    from vllm_steer.server.auth.keys import Key

_key: ContextVar[Key | None] = ContextVar("vllm_steer_key", default=None)

_READING_FIELDS = frozenset({"capture", "readouts", "stop_on"})
"""Fields whose results depend on activations."""
NO_OWNER = b""
"""Owner of captures on a server without API keys."""


@contextmanager
def use_key(key: Key | None) -> Iterator[None]:
    """Make ``key`` the current key within this context."""
    token = _key.set(key)
    try:
        yield
    finally:
        _key.reset(token)


def current_key() -> Key | None:
    """Return the key of the current request; None on a server without API keys and outside of requests."""
    return _key.get()


def current_key_name() -> str | None:
    """Return the name of the current key, if there is one."""
    key = _key.get()
    return None if key is None else key.name


def require(*rights: Right, field: str = "authorization") -> None:
    """Raise ``ForbiddenError`` for ``field`` unless the current key, if any, has all ``rights``."""
    key = _key.get()
    for right in rights:
        if key is not None and right not in key.rights:
            raise ForbiddenError(field, f"requires the right {right.value!r}, which the key {key.name!r} does not have")


def require_field_rights(names: Iterable[str]) -> None:
    """Raise ``ForbiddenError`` unless the current key may use these steering and capture fields of a body."""
    for name in names:
        require(Right.CAPTURE if name in _READING_FIELDS else Right.STEER, field=name)


def current_owner() -> bytes:
    """Return the owner of what the current request stores: the key's hash, because names can be reused."""
    key = _key.get()
    return NO_OWNER if key is None else bytes.fromhex(key.sha256)


def salt_request(_output_processor: Any, request: Any) -> None:
    """Restrict an engine request, steered or not, to the prefix cache of the current key."""
    key = _key.get()
    if key is not None and key.cache_salt:
        request.cache_salt = key.salt(request.cache_salt)
