# SPDX-License-Identifier: Apache-2.0
"""Shutdown of an API server that finishes its requests first.

With one API server, vLLM's ``--shutdown-timeout`` keeps the connection to the engine until the engine has drained. With
several, the engine belongs to the parent process, and each API server would close its connection at once, which loses
all running requests. Here, it waits for them. The last part of the timeout is left for ending requests that are still
running and for completing files, because the parent kills the process when the timeout is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from vllm_steer.frontend.context import known_engine_context
from vllm_steer.log import steering_logger
from vllm_steer.server.access_errors import DrainingError

logger = steering_logger(__name__)

_STATE = "vllm_steer_drain"
_OPEN_PREFIXES = ("/metrics", "/v1/captures/")
"""Routes that are served to the end: clients fetch the rows of requests that have just finished."""
POLL_SECONDS = 0.05


@dataclass
class Drain:
    """Requests of one API server process that must end before its shutdown."""

    loop: asyncio.AbstractEventLoop
    active: int = 0
    """POST requests that are being served."""
    draining: bool = False

    def check(self, path: str) -> None:
        """Raise `DrainingError` if the server is shutting down, except for a route that is served to the end."""
        if self.draining and not path.startswith(_OPEN_PREFIXES):
            raise DrainingError("server", "is shutting down and accepts no new requests; send it to another server")


def start_drain(app: FastAPI, engine_client: Any) -> None:
    """Count the requests of ``app`` from now on, and wait for them when ``engine_client`` is shut down."""
    drain = Drain(asyncio.get_running_loop())
    setattr(app.state, _STATE, drain)
    setattr(engine_client, _STATE, drain)


def drain_of(app: FastAPI) -> Drain | None:
    """Return the state of an application, or None if its engine runs without steering."""
    return getattr(app.state, _STATE, None)


def shutdown(original: Callable[..., None], engine_client: Any, timeout: float | None = None) -> None:
    """Run ``AsyncLLM.shutdown`` when the requests of this process have ended, or shortly before ``timeout``.

    vLLM calls it in a thread when the process gets SIGTERM, and again in the event loop, which must not wait.
    """
    drain: Drain | None = getattr(engine_client, _STATE, None)
    if drain is None or drain.draining or not timeout or _in_event_loop():
        original(engine_client, timeout=timeout)
        return
    drain.draining = True
    deadline = time.monotonic() + timeout - min(5.0, timeout / 4)
    if engine_client.engine_core.resources.engine_manager is None:
        _wait_for_requests(drain, engine_client, deadline)
    original(engine_client, timeout=timeout)
    context = known_engine_context(engine_client)
    if context is not None:
        context.capture_manager.give_up_on_hung(max(deadline - time.monotonic(), 1.0))


def _wait_for_requests(drain: Drain, engine_client: Any, deadline: float) -> None:
    logger.info("Shutdown: waiting for %d requests", drain.active)
    while drain.active and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    if drain.active:
        logger.warning("Shutdown: ending %d requests that did not finish within --shutdown-timeout", drain.active)
        running = list(engine_client.output_processor.request_states)
        asyncio.run_coroutine_threadsafe(engine_client.abort(running, internal=True), drain.loop).result(1.0)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
