# SPDX-License-Identifier: Apache-2.0
"""Authentication by API key. It runs before everything else, including vLLM's own authentication.

On a server with a key file, requests without a key only reach :data:`PUBLIC_PATHS` and the files of the studio's page.
Every key may use vLLM's inference routes, :data:`INFERENCE_PATHS`. Steering and capture fields, and the steering
routes, require the rights of the key. All other paths require the right ``admin``, because most of them change the
server.

vLLM's own keys (``--api-key``, ``VLLM_API_KEY``) remain valid for vLLM's routes, but have no steering rights. vLLM's
authentication does not know the keys of the file, so requests with such a key are passed on with one of vLLM's.
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
from vllm_steer.server.access_errors import ForbiddenError, UnauthorizedError
from vllm_steer.server.auth.key_file_watcher import KeyFileWatcher
from vllm_steer.server.auth.keys import Key
from vllm_steer.server.auth.rights import Right
from vllm_steer.server.routes.base import PLUGIN_PREFIXES, SteeringRoute, app_path, state_of
from vllm_steer.studio.routes import is_studio_path

FIELD = "authorization"
PUBLIC_PATHS = frozenset({"/health", "/ping", "/metrics", "/version", "/load"})
"""Monitoring paths, which contain no information about single requests."""
INFERENCE_PATHS = (
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
"""Paths, including those below them, of requests that do not change the server."""
ADMIN_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Paths below :data:`INFERENCE_PATHS` that change the server."""
logger = steering_logger(__name__)

VLLM_KEY = Key(name="api-key", sha256="", cache_salt="")
"""Stands for any of vLLM's own keys: no rights, no limits, and vLLM's shared prefix cache."""


@dataclass(frozen=True)
class AuthResult:
    """Result of a successful authentication."""

    key: Key | None
    """Key of the request; None on a server without a key file and for public paths."""
    scope: Scope
    """ASGI scope to pass on to the application."""

    @property
    def quota_key(self) -> Key | None:
        """Key whose limits apply to the request."""
        return None if self.key is VLLM_KEY else self.key


class Authenticator:
    """Authenticates requests with the keys of a file and with vLLM's own keys."""

    def __init__(self, keys: KeyFileWatcher, vllm_keys: tuple[str, ...]) -> None:
        self._keys = keys
        self._vllm_key_hashes = tuple(hashlib.sha256(each.encode()).digest() for each in vllm_keys)
        self._vllm_bearer = f"Bearer {vllm_keys[0]}".encode() if vllm_keys else None

    async def authenticate(self, scope: Scope) -> AuthResult:
        """Authenticate a request, and authorize it as far as its path determines the required right.

        Raises:
            UnauthorizedError: The request has no valid key.
            ForbiddenError: The key lacks the right that the path requires.
        """
        path = app_path(scope)
        preflight = scope["type"] == "http" and scope["method"] == "OPTIONS"  # browsers send these without a key
        if preflight or path.rstrip("/") in PUBLIC_PATHS or is_studio_path(path):
            return AuthResult(None, scope)
        if self._keys.is_stale():
            await asyncio.to_thread(self._keys.refresh)
        key = self._find_key(Headers(scope=scope))
        if path.startswith(PLUGIN_PREFIXES):
            if key is VLLM_KEY:
                raise ForbiddenError(
                    FIELD, "vLLM's own keys have no steering rights; create a key with `vllm-steer keys new`"
                )
            if not _declares_right(scope):
                raise ForbiddenError(FIELD, "this route declares no required right, so access is denied")
        elif key is not VLLM_KEY and not _is_inference(path) and Right.ADMIN not in key.rights:
            raise ForbiddenError(
                FIELD, f"{path[:80]} requires the right 'admin', which the key {key.name!r} does not have"
            )
        return AuthResult(key, scope if key is VLLM_KEY else self._with_vllm_key(scope))

    def _find_key(self, headers: Headers) -> Key:
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if not secret or scheme.lower() != "bearer":
            raise UnauthorizedError(FIELD, "missing API key; send the header Authorization: Bearer ...")
        key = self._keys.find(secret)
        if key is not None:
            return key
        digest = hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
        matches = [hmac.compare_digest(digest, each) for each in self._vllm_key_hashes]  # all, for constant time
        if not any(matches):
            raise UnauthorizedError(FIELD, "invalid API key")
        return VLLM_KEY

    def _with_vllm_key(self, scope: Scope) -> Scope:
        if self._vllm_bearer is None:
            return scope
        headers = [header for header in scope["headers"] if header[0].lower() != b"authorization"]
        return {**scope, "headers": [*headers, (b"authorization", self._vllm_bearer)]}


def authenticator_of(app: FastAPI) -> Authenticator | None:
    """Return the authenticator of a server; None without ``--steering-keys``.

    The first call reads the key file, and raises ``SteeringError`` if it is invalid.
    """
    args: Any = getattr(app.state, "args", None)
    path = getattr(args, "steering_keys", None)
    if path is None:
        return None
    return state_of(app, "vllm_steer_authenticator", lambda: Authenticator(KeyFileWatcher(path), vllm_keys_of(args)))


async def authenticate(scope: Scope) -> AuthResult:
    """Authenticate a request. Accepts every request on a server without a key file; raises ``AccessError``."""
    authenticator = authenticator_of(scope["app"])
    return AuthResult(None, scope) if authenticator is None else await authenticator.authenticate(scope)


def vllm_keys_of(args: object) -> tuple[str, ...]:
    """Return the keys that vLLM's own authentication accepts."""
    from vllm_steer.compat.internals import envs

    return tuple(key for key in (getattr(args, "api_key", None) or [envs.VLLM_API_KEY]) if key)


def warn_if_unprotected(args: Any) -> None:
    """Log a warning if other machines can reach a server that has no key file."""
    if getattr(args, "uds", None) is None and not _is_loopback(getattr(args, "host", None)):
        clients = "every client with a key of --api-key" if vllm_keys_of(args) else "every client"
        logger.warning(
            "This server accepts connections from other machines without --steering-keys: %s can change global "
            "steering, replace modules and capture activations. Create keys with `vllm-steer keys new`.",
            clients,
        )


def _is_inference(path: str) -> bool:
    def is_below(prefixes: tuple[str, ...]) -> bool:
        return any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes)

    return is_below(INFERENCE_PATHS) and not is_below(ADMIN_PATHS)


def _declares_right(scope: Scope) -> bool:
    """Return whether the route that will answer is a `SteeringRoute`; True if no route matches (404 or 405)."""
    routes: list[BaseRoute] = scope["app"].routes
    for wanted in (Match.FULL, Match.PARTIAL):
        for route in routes:
            if route.matches(scope)[0] is wanted:
                return isinstance(route, SteeringRoute)
    return True


def _is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address((host or "0.0.0.0").strip("[]")).is_loopback
    except ValueError:
        return False  # a host name
