# SPDX-License-Identifier: Apache-2.0
"""When a request is made again, and after how long."""

from __future__ import annotations

import random
from dataclasses import dataclass

import httpx

LATER = (429, 503)
"""Statuses with which a server says that it has done nothing, and to come again."""
NOT_ASKED = (httpx.ConnectError, httpx.ConnectTimeout)
"""A connection that was never made has asked for nothing."""


@dataclass(frozen=True)
class Retry:
    """Waits double from ``first`` seconds up to ``longest``, less up to half at random; ``Retry-After`` is heeded."""

    attempts: int = 5
    """How often a request is made at most."""
    first: float = 0.25
    longest: float = 8.0

    def wait(self, attempt: int, outcome: httpx.Response | httpx.TransportError, repeatable: bool) -> float | None:
        """Seconds until the next attempt after ``attempt`` of them, or None: this outcome stands."""
        if attempt >= self.attempts or not _may_repeat(outcome, repeatable):
            return None
        wait: float = min(self.first * 2 ** (attempt - 1), self.longest) * random.uniform(0.5, 1.0)
        if isinstance(outcome, httpx.Response):
            asked = outcome.headers.get("retry-after", "")
            if asked.isascii() and asked.isdecimal():
                wait = max(wait, min(float(asked), 60.0))
        return wait


def _may_repeat(outcome: httpx.Response | httpx.TransportError, repeatable: bool) -> bool:
    if isinstance(outcome, httpx.Response):
        return outcome.status_code in LATER
    return repeatable or isinstance(outcome, NOT_ASKED)
