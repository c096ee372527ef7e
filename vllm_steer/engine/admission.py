# SPDX-License-Identifier: Apache-2.0
"""Admission of requests: room in the device tables and in host memory for captured rows, first come first served.

The scheduler offers every waiting request in the order of its queue. A request that does not fit waits, and so does
every later request that needs room in that step, so that small requests cannot starve a large one. Requests that need
no room are never offered.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from vllm_steer.program import Resolved, TableAllocator

REFUSED = "steering: "
"""Prefix of the ``stop_reason`` of a request that the scheduler ended with an error; the reason follows."""


def rows_for(num_bytes: int, row_bytes: int) -> int:
    """Return the number of captured rows to reserve for ``num_bytes``; ``row_bytes`` is the size of an unprojected row.

    Projections count as the rows that would take as many bytes.
    """
    return -(-num_bytes // row_bytes)


def most_rows(capture_mib: int, row_bytes: int) -> int:
    """Return the most captured rows of all running requests. A request that needs more can never be admitted."""
    return (capture_mib << 20) // row_bytes


class AdmissionController:
    """Room reserved by the admitted requests of one scheduler.

    Args:
        allocator: Allocator of the device tables.
        reserved_rows_limit: Most captured rows of all running requests.
        timeout: Seconds that a request may wait; 0 for no limit.
        now: Monotonic clock.
    """

    def __init__(
        self,
        allocator: TableAllocator,
        reserved_rows_limit: int,
        timeout: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.allocator = allocator
        self._reserved_rows_limit = reserved_rows_limit
        self._timeout = timeout
        self._now = now
        self._admitted: dict[str, Resolved] = {}
        self._reserved: dict[str, int] = {}
        self.reserved_rows = 0
        """Captured rows reserved for running requests."""
        self._waiting_since: dict[str, float] = {}
        self._waiting_for: dict[str, str] = {}
        self._closed = False
        self._paused_since: float | None = None
        self.version = 0
        """Incremented whenever a reservation or a reason to wait changes."""

    def begin_step(self) -> None:
        """Start a new step, in which the scheduler offers its queue from the head again."""
        self._closed = False

    def is_admitted(self, request_id: str) -> bool:
        """Return whether the request has its room."""
        return request_id in self._admitted

    def has_capture_room(self, rows: int) -> bool:
        """Return whether ``rows`` captured rows fit beside those of running requests.

        Also True if the step is closed: the request then waits whatever its size.
        """
        return self._closed or not rows or self.reserved_rows + rows <= self._reserved_rows_limit

    def admit(self, request_id: str, resolved: Resolved, capture_rows: int) -> bool:
        """Reserve the request's room, or make it and all later requests wait in this step."""
        reason = self._reason_to_wait(resolved, capture_rows)
        if reason is not None:
            self._closed = True
            self._waiting_since.setdefault(request_id, self._now())
            if self._waiting_for.get(request_id) != reason:
                self._waiting_for[request_id] = reason
                self.version += 1
            return False
        self.allocator.acquire(resolved.token_programs)
        self._admitted[request_id] = resolved
        if capture_rows:
            self._reserved[request_id] = capture_rows
            self.reserved_rows += capture_rows
        self._waiting_since.pop(request_id, None)
        self._waiting_for.pop(request_id, None)
        self.version += 1
        return True

    def _reason_to_wait(self, resolved: Resolved, capture_rows: int) -> str | None:
        if self._closed:
            return "turn"
        if not self.has_capture_room(capture_rows):
            return "capture"
        return self.allocator.shortage(resolved.token_programs)

    def release(self, request_id: str) -> None:
        """Free the room of a request that has ended, admitted or not."""
        self._waiting_since.pop(request_id, None)
        if self._waiting_for.pop(request_id, None) is not None:
            self.version += 1
        self.reserved_rows -= self._reserved.pop(request_id, 0)
        resolved = self._admitted.pop(request_id, None)
        if resolved is not None:
            self.allocator.release(resolved.token_programs)
            self.version += 1

    def pause(self, paused: bool) -> None:
        """Pause or resume the waiting times; a paused engine admits nothing."""
        if paused:
            self._paused_since = self._now() if self._paused_since is None else self._paused_since
        elif self._paused_since is not None:
            pause, self._paused_since = self._now() - self._paused_since, None
            self._waiting_since = {request_id: since + pause for request_id, since in self._waiting_since.items()}

    def timed_out(self) -> dict[str, str]:
        """Return the error message of each request that has waited too long, by request id."""
        if not self._timeout or not self._waiting_since:
            return {}
        latest = self._now() - self._timeout
        return {
            request_id: f"waited {self._timeout:g} s (--steering-queue-timeout) for room in the steering tables or "
            "the capture budget; try again later"
            for request_id, since in self._waiting_since.items()
            if since <= latest
        }

    @property
    def num_admitted(self) -> int:
        """Number of requests that have their room."""
        return len(self._admitted)

    @property
    def is_busy(self) -> bool:
        """Whether any request has room or waits for it."""
        return bool(self._admitted or self._waiting_since)

    def waiting_by_reason(self) -> dict[str, int]:
        """Return the number of waiting requests by what they wait for.

        Reasons are ``rows``, ``instructions``, ``vectors``, ``capture``, and ``turn`` (behind another waiting request).
        """
        return dict(Counter(self._waiting_for.values()))
