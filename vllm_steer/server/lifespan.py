# SPDX-License-Identifier: Apache-2.0
"""Start and shutdown of an API server process.

The start creates the capture consumers; a consumer that cannot be created, for example because its folder is read-only,
fails the start with its message. The shutdown completes their open files.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_steer.compat.internals import envs
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import EngineContext, ensure_engine_context
from vllm_steer.server.auth.authenticator import authenticator_of, warn_if_unprotected
from vllm_steer.server.drain import start_drain
from vllm_steer.server.http.schemas import add_openapi_fields
from vllm_steer.server.malloc import keep_freed_memory
from vllm_steer.server.routes.capabilities import add_capabilities_route
from vllm_steer.server.routes.captures import capture_store_of
from vllm_steer.server.routes.live import add_live_route
from vllm_steer.server.routes.modules import add_module_routes
from vllm_steer.server.routes.patch import add_patch_routes
from vllm_steer.settings import STUDIO, dest_of
from vllm_steer.studio.routes import add_studio_routes

_LAST_MESSAGES = ("lifespan.startup.failed", "lifespan.shutdown.complete", "lifespan.shutdown.failed")


async def run_lifespan(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run the ``lifespan`` protocol of ``app``, with our start before its own and our shutdown after it."""
    startup: Message | None = await receive()
    try:
        engine = await _start(scope)
    except SteeringError as error:
        await send({"type": "lifespan.startup.failed", "message": str(error)})
        return

    async def receive_again() -> Message:
        nonlocal startup
        first, startup = startup, None
        return first if first is not None else await receive()

    async def send_last(message: Message) -> None:
        try:
            if engine is not None and message["type"] in _LAST_MESSAGES:
                # Before the message, because the process may exit as soon as the server has it.
                await asyncio.to_thread(engine.capture_manager.close)
                await asyncio.to_thread(capture_store_of(scope["app"]).close)
        finally:
            await send(message)

    if engine is None:
        await app(scope, receive_again, send_last)
        return
    envs.enable_envs_cache()  # as in vLLM's engines: its output processor reads a variable for each token
    try:
        await app(scope, receive_again, send_last)
    finally:
        envs.disable_envs_cache()


async def _start(scope: Scope) -> EngineContext | None:
    app = scope["app"]
    has_keys = authenticator_of(app) is not None
    client = getattr(app.state, "engine_client", None)
    engine = None if client is None else await ensure_engine_context(client)
    if engine is not None:
        if not has_keys:
            warn_if_unprotected(getattr(app.state, "args", None))
        keep_freed_memory()
        start_drain(app, client)
        capture_store_of(app).update_metrics()
        add_capabilities_route(app, engine)
        add_module_routes(app, engine.registry)
        add_live_route(app, client)
        add_patch_routes(app, client, engine)
        if getattr(getattr(app.state, "args", None), dest_of(STUDIO), False):
            add_studio_routes(app)
        add_openapi_fields(app)
    return engine
