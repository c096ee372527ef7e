# SPDX-License-Identifier: Apache-2.0
"""Room for captured rows in one step: how many tokens a request that reads may have.

Requests are asked in the order in which vLLM schedules them, those that run first. One that waits and whose next token
finds no room is passed over, so that requests that read nothing go on; but no other reader overtakes it in that step.
"""

from __future__ import annotations

from typing import Any

from vllm_steer.program import Resolved


class ArenaBudget:
    """What is left of ``rows`` rows of the arena in the step that is being scheduled.

    ``drafts``: most draft tokens of a request in a step. With drafts, where a request's next tokens stand is only
    known on the device, so each counts as one of those that store most.
    """

    def __init__(self, rows: int, drafts: int, speculates: bool) -> None:
        self._rows, self._drafts, self._speculates = rows, drafts, speculates
        self._left = rows
        self._closed = False
        self._most: dict[str, int] = {}
        self._all = 0

    def follow(self, request_id: str, resolved: Resolved) -> None:
        """A request has been admitted, and may be asked about."""
        if resolved.max_captures:
            self._most[request_id] = resolved.max_captures
            self._all += resolved.max_captures

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._all -= self._most.pop(request_id, 0)

    @property
    def has_readers(self) -> bool:
        """Whether anybody who may be asked about reads."""
        return bool(self._most)

    @property
    def sure(self) -> int:
        """How many tokens each of them can have in one step if nobody has more; 0 for less than a decoding request's,
        with its drafts."""
        most = 1 + self._drafts
        return most if self._all * most <= self._rows else 0

    def begin_step(self) -> None:
        """Everything is free again."""
        self._left, self._closed = self._rows, False

    def why_never(self, resolved: Resolved, spans: list[tuple[int, int]]) -> str | None:
        """Why a request can never have its tokens, or None. ``spans``: positions ``[start, stop)`` that vLLM computes
        in one step or not at all."""
        needed = resolved.max_captures * (1 + self._drafts)
        for start, stop in spans:
            needed = max(needed, self._in_one_step(resolved, start, stop))
        if needed <= self._rows:
            return None
        return f"captures {needed} rows in one step, and there is room for {self._rows} (--steering-capture-rows)"

    def fits_anywhere(self, resolved: Resolved, spans: list[tuple[int, int]]) -> bool:
        """Whether a request that waits can have its next token, wherever it would begin."""
        return not self._closed and not spans and resolved.max_captures * (1 + self._drafts) <= self._left

    def lets_in(self, resolved: Resolved, position: int, spans: list[tuple[int, int]]) -> bool:
        """Whether a request that waits, and would begin at ``position``, can have its next token, or all that must be
        computed with it; no reader can in the rest of a step in which one cannot."""
        needed = self._in_one_step(resolved, position, position + 1) * (1 + self._drafts)
        for start, stop in spans:
            if start == position:
                needed = max(needed, self._in_one_step(resolved, start, stop))
        self._closed = self._closed or needed > self._left
        return not self._closed

    def take(self, resolved: Resolved, start: int, tokens: int, whole: bool, spans: list[tuple[int, int]]) -> int:
        """How many of ``tokens`` tokens from ``start`` on the request gets, whose rows are taken.

        ``whole``: all of them or none. ``spans``: none of these is cut into two.
        """
        if start >= resolved.read_range[1] and not self._speculates:
            return tokens
        if tokens == 1 and resolved.max_captures <= self._left:
            # Decoding, which is nearly always: what one token can store at most.
            self._left -= resolved.max_captures
            return tokens
        given, rows = self._fitting(resolved, start, tokens)
        if given < tokens:
            end = 0 if whole else _ahead_of(spans, start, start + given) - start
            given, rows = self._fitting(resolved, start, max(end, 0))
        self._left -= rows
        return given

    def _fitting(self, resolved: Resolved, start: int, tokens: int) -> tuple[int, int]:
        """The most of ``tokens`` tokens from ``start`` on whose rows fit what is left, and those rows."""
        if self._speculates:
            tokens = min(tokens, self._left // resolved.max_captures)
            return tokens, tokens * resolved.max_captures
        taken = rows = 0
        for from_, to, segment in resolved.spans(start, start + tokens):
            count = to - from_
            if segment.num_captures:
                count = min(count, (self._left - rows) // segment.num_captures)
            taken += count
            rows += count * segment.num_captures
            if count < to - from_:
                break
        return taken, rows

    def _in_one_step(self, resolved: Resolved, start: int, stop: int) -> int:
        if self._speculates:
            return (stop - start) * resolved.max_captures
        return sum((to - from_) * segment.num_captures for from_, to, segment in resolved.spans(start, stop))


def unsplit_spans(request: Any, scheduler_config: Any) -> list[tuple[int, int]]:
    """The positions of each image and the like of a request, where the model's attention needs it in one step.

    vLLM sees to that (``Scheduler._try_schedule_encoder_inputs``) ahead of its last word on a request's tokens.
    """
    if not scheduler_config.disable_chunked_mm_input:
        return []
    places = [feature.mm_position for feature in request.mm_features]
    return [(place.offset, place.offset + place.length) for place in places]


def _ahead_of(spans: list[tuple[int, int]], start: int, end: int) -> int:
    """``end``, or the beginning of what it would cut into two."""
    return min([end, *(first for first, last in spans if start <= first < end < last)])
