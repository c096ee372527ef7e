# SPDX-License-Identifier: Apache-2.0
"""Who comes in, where a server has a file of keys; it is outside of everything, vLLM's own authentication included.

Without a key, nothing is answered but :data:`OPEN`. vLLM's routes that only serve the request itself, :data:`SERVING`,
are for every key, what our fields ask for is for its rights, and all that is left takes the right ``admin``: most of it
changes the server.

vLLM's own keys (``--api-key``, ``VLLM_API_KEY``) stay good for vLLM's own routes, and for nothing of ours. Towards
vLLM's authentication, which knows nothing of our keys, a request with one of ours carries one of vLLM's.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from vllm_steer.log import steering_logger
from vllm_steer.server.auth.key_file import KeyFile
from vllm_steer.server.auth.keys import Key
from vllm_steer.server.auth.rights import ForbiddenError, Right, UnauthorizedError
from vllm_steer.server.routes.base import PLUGIN_PREFIXES, SteeringRoute, app_path

FIELD = "authorization"
OPEN = frozenset({"/health", "/ping", "/metrics", "/version", "/load"})
"""What whoever watches over a server asks for: these tell of no request."""
SERVING = (
    "/v1",
    "/v2",
    "/cohere/v2",
    "/inference/v1/generate",
    "/invocations",
    "/tokenize",
    "/detokenize",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/generative_scoring",
)
"""Paths, with all below them, of requests that are served and leave nothing behind."""
CHANGING = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Paths among these that do."""
_STATE = "vllm_steer_entrance"
logger = steering_logger(__name__)

VLLM_KEY = Key(name="api-key", sha256="", cache_salt="")
"""Stands for whoever has one of vLLM's own keys: no right of ours, no limit, and vLLM's own prefix cache."""


@dataclass(frozen=True)
class AuthResult:
    """A request that may come in."""

    key: Key | None
    """None where there are no keys, and for :data:`OPEN`."""
    scope: Scope
    """As the application is to see it."""

    @property
    def limited(self) -> Key | None:
        """The key on whose account this goes."""
        return None if self.key is VLLM_KEY else self.key


class Authenticator:
    """Lets requests in, by a file of keys."""

    def __init__(self, keys: KeyFile, vllm_keys: tuple[str, ...]) -> None:
        self._keys = keys
        self._vllm_keys = tuple(hashlib.sha256(each.encode()).digest() for each in vllm_keys)
        self._bearer = f"Bearer {vllm_keys[0]}".encode() if vllm_keys else None

    async def admit(self, scope: Scope) -> AuthResult:
        """Raises UnauthorizedError, and ForbiddenError where the path alone says that the key may not."""
        path = app_path(scope)
        preflight = scope["type"] == "http" and scope["method"] == "OPTIONS"  # browsers send these without a key
        if preflight or path.rstrip("/") in OPEN:
            return AuthResult(None, scope)
        if self._keys.is_stale():
            await asyncio.to_thread(self._keys.refresh)
        key = self._key_of(Headers(scope=scope))
        if path.startswith(PLUGIN_PREFIXES):
            if key is VLLM_KEY:
                raise ForbiddenError(
                    FIELD, "is a key of vLLM's, which has no rights here; vllm-steer keys makes others"
                )
            if not _states_its_right(scope):
                raise ForbiddenError(FIELD, "this route states no right, so it is for nobody")
        elif key is not VLLM_KEY and not _is_served(path) and Right.ADMIN not in key.rights:
            raise ForbiddenError(FIELD, f"{path[:80]} takes the right admin, which the key {key.name} does not have")
        return AuthResult(key, scope if key is VLLM_KEY else self._as_vllm_knows_it(scope))

    def _key_of(self, headers: Headers) -> Key:
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if not secret or scheme.lower() != "bearer":
            raise UnauthorizedError(FIELD, "is missing; this server takes API keys, Authorization: Bearer ...")
        key = self._keys.find(secret)
        if key is None and self._is_vllms(secret):
            key = VLLM_KEY
        if key is None:
            raise UnauthorizedError(FIELD, "is no key that this server knows")
        return key

    def _is_vllms(self, secret: str) -> bool:
        digest = hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
        matches = [hmac.compare_digest(digest, each) for each in self._vllm_keys]  # all of them, whatever is found
        return any(matches)

    def _as_vllm_knows_it(self, scope: Scope) -> Scope:
        if self._bearer is None:
            return scope
        headers = [header for header in scope["headers"] if header[0].lower() != b"authorization"]
        return {**scope, "headers": [*headers, (b"authorization", self._bearer)]}


def _is_served(path: str) -> bool:
    def is_under(prefixes: tuple[str, ...]) -> bool:
        return any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes)

    return is_under(SERVING) and not is_under(CHANGING)


def _states_its_right(scope: Scope) -> bool:
    """Whether the route that will answer asks for a right; also where none will, which gets a 404 or 405."""
    routes: list[BaseRoute] = scope["app"].routes
    for wanted in (Match.FULL, Match.PARTIAL):
        for route in routes:
            if route.matches(scope)[0] is wanted:
                return isinstance(route, SteeringRoute)
    return True


def authenticator_of(app: FastAPI) -> Authenticator | None:
    """The entrance of a server whose flags name a file of keys; it is read at first. Raises SteeringError."""
    entrance: Authenticator | None = getattr(app.state, _STATE, None)
    args: Any = getattr(app.state, "args", None)
    path = getattr(args, "steering_keys", None)
    if entrance is None and path is not None:
        entrance = Authenticator(KeyFile(path), vllm_keys_of(args))
        setattr(app.state, _STATE, entrance)
    return entrance


def vllm_keys_of(args: object) -> tuple[str, ...]:
    """The keys that vLLM's own authentication takes."""
    from vllm import envs

    return tuple(key for key in (getattr(args, "api_key", None) or [envs.VLLM_API_KEY]) if key)


def warn_if_open(args: Any) -> None:
    """Say in the log that everybody may do everything, where others than this machine can ask."""
    if getattr(args, "uds", None) is None and not _is_loopback(getattr(args, "host", None)):
        also = "anybody with a key of --api-key" if vllm_keys_of(args) else "anybody who can reach it"
        logger.warning(
            "This server can be reached from other machines and has no --steering-keys: %s may steer everybody, "
            "replace modules and read activations. vllm-steer keys new makes a key.",
            also,
        )


def _is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address((host or "0.0.0.0").strip("[]")).is_loopback
    except ValueError:
        return False  # a name, of whatever address


async def admit(scope: Scope) -> AuthResult:
    """Let a request in; without a file of keys, everybody is. Raises an AccessError."""
    entrance = authenticator_of(scope["app"])
    return AuthResult(None, scope) if entrance is None else await entrance.admit(scope)
