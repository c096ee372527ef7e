# SPDX-License-Identifier: Apache-2.0
"""Threads that read large request bodies, so that the event loop serves other requests meanwhile.

Few threads run, and few bodies wait for them: a client that sends many large bodies gets HTTP 503 instead of the memory
and the threads of the server.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import ParamSpec, TypeVar

from vllm_steer.server.access_errors import ServerFullError

P = ParamSpec("P")
T = TypeVar("T")

LARGE_BODY = 1 << 16
"""Bytes from which a body is read in a thread; reading a smaller one takes a few milliseconds."""
_THREADS = 2
_MAX_BODIES = 16
"""Bodies that are read or wait at one time."""


class BodyChecks:
    """A pool of threads with a bounded queue."""

    def __init__(self, threads: int = _THREADS, max_bodies: int = _MAX_BODIES) -> None:
        self._pool = ThreadPoolExecutor(threads, "vllm-steer-body")
        self._max_bodies = max_bodies
        self._lock = threading.Lock()
        self.bodies = 0
        """Bodies that are read or wait. One whose client has left counts until its thread is done with it."""

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``function(*args, **kwargs)``, called in a thread with the current context variables.

        Raises:
            ServerFullError: Too many bodies wait.
        """
        with self._lock:
            if self.bodies >= self._max_bodies:
                raise ServerFullError(
                    "body", f"this server already reads {self._max_bodies} large bodies; retry later, or send less"
                )
            self.bodies += 1
        try:
            call = partial(function, *args, **kwargs)
            future: Future[T] = self._pool.submit(contextvars.copy_context().run, call)
        except BaseException:
            self._release()
            raise
        future.add_done_callback(self._release)
        return await asyncio.wrap_future(future)

    def _release(self, _future: Future[T] | None = None) -> None:
        with self._lock:
            self.bodies -= 1


@cache
def body_checks() -> BodyChecks:
    """Return the pool of this process."""
    return BodyChecks()
