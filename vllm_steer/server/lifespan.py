# SPDX-License-Identifier: Apache-2.0
"""The beginning and the end of an API server process.

At the beginning the consumers of captures are made: one that cannot be, since its folder is read-only, say, ends the
start with a sentence. At the end they complete what they have open.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import EngineContext, ensure_engine_context
from vllm_steer.server.auth.authenticator import authenticator_of, warn_if_unprotected
from vllm_steer.server.http.openapi import document_fields
from vllm_steer.server.routes.capabilities import add_capabilities_route
from vllm_steer.server.routes.captures import store_of
from vllm_steer.server.routes.modules import add_routes

_LAST = ("lifespan.startup.failed", "lifespan.shutdown.complete", "lifespan.shutdown.failed")


async def live(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Pass the ``lifespan`` protocol on to ``app``, with our own start before its own and our end after it."""
    startup: Message | None = await receive()
    try:
        served = await _start(scope)
    except SteeringError as error:
        await send({"type": "lifespan.startup.failed", "message": str(error)})
        return

    async def receive_again() -> Message:
        nonlocal startup
        first, startup = startup, None
        return first if first is not None else await receive()

    async def send_at_last(message: Message) -> None:
        try:
            if served is not None and message["type"] in _LAST:
                # Before the message: the process may end as soon as the server has it.
                await asyncio.to_thread(served.desk.close)
                await asyncio.to_thread(store_of(scope["app"]).close)
        finally:
            await send(message)

    await app(scope, receive_again, send_at_last)


async def _start(scope: Scope) -> EngineContext | None:
    guarded = authenticator_of(scope["app"]) is not None
    engine = getattr(scope["app"].state, "engine_client", None)
    served = None if engine is None else await ensure_engine_context(engine)
    if served is not None:
        if not guarded:
            warn_if_unprotected(getattr(scope["app"].state, "args", None))
        store_of(scope["app"]).show()
        add_capabilities_route(scope["app"], served)
        add_routes(scope["app"], served.registry)
        document_fields(scope["app"])
    return served
