# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware of every server: steering and capture fields are applied or refused, never ignored.

Authentication and quotas come first. The body is checked only when a route reads it, so also after vLLM's own
authentication; a request without steering fields costs a search for their names. Errors inside the fields are found
when vLLM creates sampling parameters (``apply_fields.py``). Errors around them are refused by ``request_guard.py``.
"""

from __future__ import annotations

from fastapi import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_steer.compat.stages import front_end_joins
from vllm_steer.compat.wraps import install
from vllm_steer.errors import SteeringError
from vllm_steer.server.auth.authenticator import authenticate
from vllm_steer.server.auth.current_key import use_key
from vllm_steer.server.drain import drain_of
from vllm_steer.server.http.error_response import error_response
from vllm_steer.server.http.request_context import current_request
from vllm_steer.server.http.request_guard import COMPOSING_ROUTES, RequestGuard
from vllm_steer.server.http.websocket import WebSocketGuard
from vllm_steer.server.lifespan import run_lifespan
from vllm_steer.server.quota.tracker import Reservation, quota_tracker_of
from vllm_steer.server.routes.base import COUNTED_KEY, OWN_BODY_PREFIXES, RESERVATION_KEY, app_path


class SteeringMiddleware:
    """Pure ASGI middleware, so streams pass through unbuffered."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        # Once more: vLLM imports its serving code after it has made the engine's configuration.
        install(front_end_joins())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await run_lifespan(self.app, scope, receive, send)
            return
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        drain = drain_of(scope["app"])
        try:
            if drain is not None:
                drain.check(app_path(scope))
            auth = await authenticate(scope)
            reservation = quota_tracker_of(scope["app"]).reserve(None if COUNTED_KEY in scope else auth.quota_key)
        except SteeringError as error:
            await error_response(error)(scope, receive, send)
            return
        counted = drain if scope.get("method") == "POST" else None
        if counted is not None:
            counted.active += 1
        try:
            with use_key(auth.key):
                await self._serve(auth.scope, receive, send, reservation)
        finally:
            if counted is not None:
                counted.active -= 1
            reservation.release()

    async def _serve(self, scope: Scope, receive: Receive, send: Send, reservation: Reservation) -> None:
        if scope["type"] == "websocket":
            socket = WebSocketGuard(scope, receive, send)
            await self.app(scope, socket.receive, socket.send)
        elif scope["method"] != "POST" or app_path(scope).startswith(OWN_BODY_PREFIXES):
            scope[RESERVATION_KEY] = reservation
            await self.app(scope, receive, send)  # without steering fields, or a route that checks its body itself
        else:
            await self._serve_post(scope, receive, send, reservation)

    async def _serve_post(self, scope: Scope, receive: Receive, send: Send, reservation: Reservation) -> None:
        guard = RequestGuard(scope, receive, send, reservation)
        try:
            if app_path(scope) in COMPOSING_ROUTES:
                await guard.refresh_registry()
        except SteeringError as error:  # the registry cannot be read
            await error_response(error)(scope, receive, send)
            return
        token = current_request.set(guard.context)
        try:
            await self.app(scope, guard.receive, guard.send)
        except HTTPException:  # raised by `guard.receive` in another middleware, outside FastAPI's error handlers
            if not guard.refusal_pending:
                raise
            await guard.refuse()
        finally:
            current_request.reset(token)
            guard.context.close()
