# SPDX-License-Identifier: Apache-2.0
"""Threads that read large request bodies or use the registry, so that the event loop serves other requests meanwhile.

Few threads run, and few calls wait for them: a client that sends many large bodies gets HTTP 503 instead of the memory
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
_FULL = "this server already reads {} large bodies; retry later, or send less"
_BUSY = "this server already serves {} requests for modules and global steering; retry later"
_REGISTRY_THREADS = 4
_MAX_REGISTRY_CALLS = 32
"""Calls of the registry's routes that run or wait at one time."""
_MAX_CLEARING_CALLS = 1024
"""Like it, of the route that clears global steering."""


class BodyChecks:
    """A pool of threads with a bounded queue."""

    def __init__(
        self, threads: int = _THREADS, max_bodies: int = _MAX_BODIES, field: str = "body", full: str = _FULL
    ) -> None:
        """Create the pool; ``field`` and ``full``, with the maximum for ``{}``, make the error of a full queue."""
        self._pool = ThreadPoolExecutor(threads, f"vllm-steer-{field}")
        self._max_bodies = max_bodies
        self._field, self._full = field, full
        self._lock = threading.Lock()
        self.bodies = 0
        """Bodies that are read or wait. One whose client has left counts until its thread is done with it."""

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``function(*args, **kwargs)``, called in a thread with the current context variables.

        Raises:
            ServerFullError: Too many calls run or wait.
        """
        with self._lock:
            if self.bodies >= self._max_bodies:
                raise ServerFullError(self._field, self._full.format(self._max_bodies))
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


@cache
def registry_calls() -> BodyChecks:
    """Return the pool for the registry's routes; a slow database takes no thread from the bodies of completions."""
    return BodyChecks(_REGISTRY_THREADS, _MAX_REGISTRY_CALLS, "registry", _BUSY)


@cache
def clearing_calls() -> BodyChecks:
    """Return the pool that clears global steering: no call that hangs, and no full queue, can keep steering on."""
    return BodyChecks(_THREADS, _MAX_CLEARING_CALLS, "registry", _BUSY)
