# SPDX-License-Identifier: Apache-2.0
"""The thread of one consumer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any


class ConsumerThread:
    """Runs jobs one at a time, in order.

    A daemon thread: unlike those of ``ThreadPoolExecutor``, it cannot keep the process from ending if a job hangs.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = _State()
        self._started = False

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue a job and return its future; raise ``RuntimeError`` if the thread accepts no more jobs."""
        if self._state.closed:
            raise RuntimeError("no more jobs are accepted")
        return self._queue(function, *args)

    def _queue(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        state = self._state
        with state.changed:
            state.jobs.append((future, function, args))
            state.changed.notify()
            if not self._started:
                self._started = True
                threading.Thread(target=_run, args=(state,), name=self._name, daemon=True).start()
        return future

    def close(self) -> None:
        """Accept no more jobs."""
        self._state.closed = True

    def finish(self, function: Callable[..., Any], *args: Any) -> None:
        """Run a last job after those that are queued, unless they were abandoned, and end the thread."""
        with self._state.changed:
            if not self._state.abandoned:
                self._queue(function, *args)
            self._state.finished = True
            self._state.changed.notify()

    def settle(self, stalled_after: float) -> bool:
        """Wait for all jobs; return False as soon as none has ended for ``stalled_after`` seconds."""
        while True:
            with self._state.changed:
                ended, unfinished = self._state.ended, self._state.unfinished()
            if not unfinished:
                return True
            wait(unfinished, stalled_after)
            if self._state.ended == ended and not all(future.done() for future in unfinished):
                return False

    def abandon(self, result: Any) -> int:
        """Give ``result`` to all jobs that have not ended, accept no more, and return their number."""
        with self._state.changed:
            unfinished = self._state.unfinished()
            self._state.jobs.clear()
            self._state.closed = self._state.abandoned = self._state.finished = True
        for future in unfinished:
            with suppress(InvalidStateError):  # it has ended meanwhile
                future.set_result(result)
        return len(unfinished)


class _State:
    """What the thread shares with its owner, which it must not keep alive."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.jobs: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self.running: Future[Any] | None = None
        self.ended = 0
        self.closed = self.finished = self.abandoned = False

    def unfinished(self) -> list[Future[Any]]:
        return [future for future in (self.running, *(job[0] for job in self.jobs)) if future is not None]


def _run(state: _State) -> None:
    while True:
        with state.changed:
            while not state.jobs and not state.finished:
                state.changed.wait()
            if not state.jobs:
                return
            future, function, args = state.jobs.popleft()
            state.running = future
        try:
            result = function(*args)
        except BaseException as error:  # the owner reads it from the future
            with suppress(InvalidStateError):
                future.set_exception(error)
        else:
            with suppress(InvalidStateError):  # abandoned meanwhile
                future.set_result(result)
            del result
        with state.changed:
            state.running, state.ended = None, state.ended + 1
        # The thread waits without keeping rows alive.
        del future, function, args
