# SPDX-License-Identifier: Apache-2.0
"""Retry policy of the clients."""

from __future__ import annotations

import random
from dataclasses import dataclass

import httpx

_RETRY_STATUSES = (429, 503)  # the server has not processed the request
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout)
_MAX_RETRY_AFTER = 60.0


@dataclass(frozen=True)
class Retry:
    """Exponential backoff with jitter.

    The delay doubles from ``first`` up to ``longest`` seconds and is reduced by up to half at random. A longer
    ``Retry-After`` of the server is respected up to 60 seconds.
    """

    attempts: int = 5
    """Most attempts per request."""
    first: float = 0.25
    """First delay in seconds."""
    longest: float = 8.0
    """Longest delay in seconds."""

    def delay(self, attempt: int, outcome: httpx.Response | httpx.TransportError, idempotent: bool) -> float | None:
        """Return the seconds to wait before the next attempt, or None if the outcome is final.

        Args:
            attempt: Number of attempts so far.
            outcome: Error response or connection error of the last attempt.
            idempotent: Whether a request that may have reached the server can be sent again.
        """
        if attempt >= self.attempts:
            return None
        delay: float = min(self.first * 2 ** (attempt - 1), self.longest) * random.uniform(0.5, 1.0)
        if isinstance(outcome, httpx.TransportError):
            return delay if idempotent or isinstance(outcome, _NOT_SENT) else None
        if outcome.status_code not in _RETRY_STATUSES:
            return None
        retry_after = outcome.headers.get("retry-after", "")
        if retry_after.isascii() and retry_after.isdecimal():
            delay = max(delay, min(float(retry_after), _MAX_RETRY_AFTER))
        return delay
