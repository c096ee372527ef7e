# SPDX-License-Identifier: Apache-2.0
"""Who may start: places in the device tables and host memory for captured rows, first come first served.

The scheduler asks for every waiting request, in the order of its queue. What does not fit waits, and from the first one
that waits on, nobody who needs places is let in during that step: a small request cannot overtake a large one for ever.
Requests that need no places are never asked about and pass.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from vllm_steer.program import Resolved, TableAllocator

REFUSED = "steering: "
"""How the ``stop_reason`` of a request begins that the scheduler ended with an error; the reason follows."""


class AdmissionController:
    """The books of one scheduler, by request.

    ``capture_rows``: how many captured rows all running requests may come to. ``timeout``: seconds that a request may
    wait for its places; 0 for no limit. ``now``: a monotonic clock.
    """

    def __init__(
        self, ledger: TableAllocator, capture_rows: int, timeout: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.ledger = ledger
        self._timeout = timeout
        self._now = now
        self._capture_rows = capture_rows
        self._captures: dict[str, int] = {}
        self.captures_booked = 0
        """Captured rows that running requests may come to."""
        self._admitted: dict[str, Resolved] = {}
        self._waiting_since: dict[str, float] = {}
        self._waiting_for: dict[str, str] = {}
        self._closed = False
        self._stopped: float | None = None
        self.changes = 0
        """Counts up whenever any of the books changes."""

    def begin_step(self) -> None:
        """A new step: the queue is asked about from its head again."""
        self._closed = False

    def has(self, request_id: str) -> bool:
        """Whether the request holds its places; it does from its admission to its end, through preemptions."""
        return request_id in self._admitted

    def has_room_for_captures(self, rows: int) -> bool:
        """Whether ``rows`` captured rows fit beside those of running requests; also true of a step that is closed."""
        return self._closed or not rows or self.captures_booked + rows <= self._capture_rows

    def admit(self, request_id: str, resolved: Resolved, capture_rows: int) -> bool:
        """Book the request's places, or let it and all after it wait in this step."""
        reason = self._reason_to_wait(resolved, capture_rows)
        if reason is not None:
            self._closed = True
            self._waiting_since.setdefault(request_id, self._now())
            if self._waiting_for.get(request_id) != reason:
                self._waiting_for[request_id] = reason
                self.changes += 1
            return False
        self.ledger.acquire(resolved.token_programs)
        self._admitted[request_id] = resolved
        if capture_rows:
            self._captures[request_id] = capture_rows
            self.captures_booked += capture_rows
        self._waiting_since.pop(request_id, None)
        self._waiting_for.pop(request_id, None)
        self.changes += 1
        return True

    def _reason_to_wait(self, resolved: Resolved, capture_rows: int) -> str | None:
        if self._closed:
            return "turn"
        if not self.has_room_for_captures(capture_rows):
            return "capture"
        return self.ledger.shortage(resolved.token_programs)

    def release(self, request_id: str) -> None:
        """The request has ended, admitted or not; its places are free."""
        self._waiting_since.pop(request_id, None)
        if self._waiting_for.pop(request_id, None) is not None:
            self.changes += 1
        self.captures_booked -= self._captures.pop(request_id, 0)
        resolved = self._admitted.pop(request_id, None)
        if resolved is not None:
            self.ledger.release(resolved.token_programs)
            self.changes += 1

    def stop_clock(self, stopped: bool) -> None:
        """While the engine is paused nobody is let in, whatever room there is: that time is nobody's waiting."""
        if stopped:
            self._stopped = self._now() if self._stopped is None else self._stopped
        elif self._stopped is not None:
            gone, self._stopped = self._now() - self._stopped, None
            self._waiting_since = {request_id: since + gone for request_id, since in self._waiting_since.items()}

    def overdue(self) -> dict[str, str]:
        """Requests that have waited for their places too long, and what to tell each."""
        if not self._timeout or not self._waiting_since:
            return {}
        latest = self._now() - self._timeout
        return {
            request_id: f"waited {self._timeout:g} s (--steering-queue-timeout) for room in the steering tables or the "
            "capture budget, which running requests take up; try again later"
            for request_id, since in self._waiting_since.items()
            if since <= latest
        }

    @property
    def num_admitted(self) -> int:
        """Requests that hold places."""
        return len(self._admitted)

    @property
    def is_busy(self) -> bool:
        """Whether any request holds places or waits for some."""
        return bool(self._admitted or self._waiting_since)

    def waiting(self) -> dict[str, int]:
        """How many requests wait, by what there was too little of when they were last asked about: ``rows``,
        ``instructions``, ``vectors``, ``capture``; ``turn``: behind another one that waits."""
        return dict(Counter(self._waiting_for.values()))

    @property
    def num_waiting(self) -> int:
        """Requests that wait for places, as far as the queue has been asked about."""
        return len(self._waiting_since)
