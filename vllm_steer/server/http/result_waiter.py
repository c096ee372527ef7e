# SPDX-License-Identifier: Apache-2.0
"""Waiting of the event loop: for a client that leaves, and for results of consumers' threads.

All results that are ready have one wake-up. ``asyncio.wrap_future`` writes to the loop's socket once per result.
Consumers often finish the samples of a step one after another, before the loop runs.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from starlette.types import Receive

_T = TypeVar("_T")


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Arrivals:
    """Waiters of one event loop whose results are ready."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: list[asyncio.Future[None]] = []

    def add(self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
        """Have a waiter woken, from any thread."""
        with self._lock:
            self._ready.append(waiter)
            is_first = len(self._ready) == 1
        if is_first:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        with self._lock:
            ready, self._ready = self._ready, []
        for waiter in ready:
            if not waiter.done():  # a waiter is cancelled with its request
                waiter.set_result(None)


# The arrivals do not refer to their loop, so both are freed together.
_arrivals: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Arrivals] = weakref.WeakKeyDictionary()


async def wait_for(future: Future[_T]) -> _T:
    """Return the result of a future of another thread. If the caller is cancelled, the future is not."""
    if future.done():
        return future.result()
    loop = asyncio.get_running_loop()
    arrivals = _arrivals.setdefault(loop, _Arrivals())
    waiter: asyncio.Future[None] = loop.create_future()
    future.add_done_callback(lambda _: arrivals.add(loop, waiter))
    await waiter
    return future.result()
