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
        # By request id.
        self._prompt_lens: dict[str, int] = {}
        # By live id: kept while a request is preempted, and set before its first step.
        self._strengths: dict[str, dict[str, float]] = {}
        # By request id: strengths that hold from the end of the prompt on.
        self.delayed: dict[str, dict[str, float]] = {}
        # By live id: next positions of preempted requests, which have no slot.
        self._paused: dict[str, int] = {}
        # Live ids of the requests that have ended last.
        self._ended: dict[str, None] = {}

    def begin(self, request_id: str, live: str, prompt_len: int) -> None:
        """Record that a request has got a slot, for the first time or after a preemption."""
        if self._live_ids.get(request_id, live) != live:
            self.end([request_id])
        self._live_ids[request_id], self._request_ids[live] = live, request_id
        self._prompt_lens[request_id] = prompt_len
        self._paused.pop(live, None)
        self._ended.pop(live, None)

    def pause(self, request_id: str, position: int) -> None:
        """Record the next position of a request that has lost its slot."""
        self.end_delay(request_id, position)
        self._paused[self._live_ids[request_id]] = position

    def end(self, request_ids: Iterable[str]) -> None:
        """Forget the strengths of requests that have ended."""
        for request_id in request_ids:
            live = self._live_ids.pop(request_id, None)
            if live is not None:
                self._prompt_lens.pop(request_id, None)
                self.delayed.pop(request_id, None)
                self._request_ids.pop(live, None)
                self._strengths.pop(live, None)
                self._paused.pop(live, None)
                self._ended[live] = None
                if len(self._ended) > _MAX_KEPT:
                    del self._ended[next(iter(self._ended))]

    def set(self, live: str, strengths: Mapping[str, float], position: int | None) -> int:
        """Set strengths of a request, and return the first position that has them, or ENDED.

        A prompt is never split: strengths that are set within it hold from its end on.

        Args:
            live: The request's live id.
            strengths: New factors by name.
            position: The request's next position, or None if it has no slot.
        """
        if position is None:
            if live in self._ended:
                return ENDED
            position = self._paused.get(live, 0)
        request_id = self._request_ids.get(live, "")
        prompt_len = self._prompt_lens.get(request_id, 0)
        if request_id in self.delayed or 0 < position < prompt_len:
            self.delayed.setdefault(request_id, {}).update(strengths)
            return prompt_len
        self._strengths.setdefault(live, {}).update(strengths)
        if len(self._strengths) > _MAX_KEPT:
            # A request that ended before its first step, or before its change arrived.
            old = next((each for each in self._strengths if each not in self._request_ids), live)
            if old != live:
                del self._strengths[old]
        return position

    def end_delay(self, request_id: str, position: int) -> bool:
        """Return whether delayed strengths of a request hold now that its next position is ``position``."""
        if request_id not in self.delayed or position < self._prompt_lens[request_id]:
            return False
        self._strengths.setdefault(self._live_ids[request_id], {}).update(self.delayed.pop(request_id))
        return True

    def of(self, request_id: str) -> Mapping[str, float]:
        """Return the strengths of a request that has begun."""
        return self._strengths.get(self._live_ids.get(request_id, ""), {})

    def request_id(self, live: str) -> str | None:
        """Return the id of a request that has begun, or None."""
        return self._request_ids.get(live)
