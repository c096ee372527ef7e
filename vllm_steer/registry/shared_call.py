# SPDX-License-Identifier: Apache-2.0
"""One call in a thread for all coroutines that wait for its result."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedCall(Generic[T]):
    """A function that runs in a thread of its own, once for all that ask before it begins.

    A function without an answer, such as a query of a database, takes one thread however many requests wait for it, and
    none of those that other work needs.
    """

    def __init__(self, function: Callable[[], T], thread: str) -> None:
        self._function = function
        self._pool = ThreadPoolExecutor(1, thread)
        self._lock = threading.Lock()
        self._next: Future[T] | None = None
        """The call that has not begun yet."""

    async def run(self) -> T:
        """Return the result of a call that begins after this one."""
        with self._lock:
            if self._next is None:
                self._next = self._pool.submit(self._call)
            waiting = self._next
        # A client that leaves does not cancel the call for the others.
        return await asyncio.shield(asyncio.wrap_future(waiting))

    def _call(self) -> T:
        with self._lock:
            self._next = None
        return self._function()
