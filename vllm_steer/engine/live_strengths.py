# SPDX-License-Identifier: Apache-2.0
"""Live strengths of the requests of a worker. They can be set before a request's first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_MAX_KEPT = 4096
"""Requests whose live strengths are kept, and ended requests that are remembered."""
ENDED = -1
"""Position of a request that has ended."""


class LiveStrengths:
    """Live strengths that have been set, by live id (:func:`vllm_steer.params.live_id`).

    Request ids are not enough: a new request may have the id of an ended one, whose end the worker learns later.
    """

    def __init__(self) -> None:
        # Requests that have begun and have not ended: live id by request id, and request id by live id.
        self._live_ids: dict[str, str] = {}
        self._request_ids: dict[str, str] = {}
        # By live id: kept while a request is preempted, and set before its first step.
        self._strengths: dict[str, dict[str, float]] = {}
        # Next positions of requests that have no slot: preempted ones, and ENDED.
        self._paused: dict[str, int] = {}

    def begin(self, request_id: str, live: str) -> None:
        """Record that a request has got a slot, for the first time or after a preemption."""
        if self._live_ids.get(request_id, live) != live:
            self.end([request_id])
        self._live_ids[request_id], self._request_ids[live] = live, request_id
        self._paused.pop(live, None)

    def pause(self, request_id: str, position: int) -> None:
        """Record the next position of a request that has lost its slot."""
        self._set_position(self._live_ids[request_id], position)

    def end(self, request_ids: Iterable[str]) -> None:
        """Forget the strengths of requests that have ended."""
        for request_id in request_ids:
            live = self._live_ids.pop(request_id, None)
            if live is not None:
                self._request_ids.pop(live, None)
                self._strengths.pop(live, None)
                self._set_position(live, ENDED)

    def set(self, live: str, strengths: Mapping[str, float]) -> bool:
        """Set strengths of a request, and return whether it has not ended."""
        if self._paused.get(live) == ENDED:
            return False
        self._strengths.setdefault(live, {}).update(strengths)
        if len(self._strengths) > _MAX_KEPT:
            # A request that ended before its first step, or before its change arrived.
            old = next((each for each in self._strengths if each not in self._request_ids), live)
            if old != live:
                del self._strengths[old]
        return True

    def of(self, request_id: str) -> Mapping[str, float]:
        """Return the strengths of a request that has begun."""
        return self._strengths.get(self._live_ids.get(request_id, ""), {})

    def request_id(self, live: str) -> str | None:
        """Return the id of a request that has begun, or None."""
        return self._request_ids.get(live)

    def position(self, live: str) -> int:
        """Return the next position of a request without a slot, 0 if it has not begun."""
        return self._paused.get(live, 0)

    def _set_position(self, live: str, position: int) -> None:
        self._paused[live] = position
        if len(self._paused) > _MAX_KEPT:
            del self._paused[next(iter(self._paused))]
