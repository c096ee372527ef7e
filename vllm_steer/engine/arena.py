# SPDX-License-Identifier: Apache-2.0
"""How many tokens a capturing request may have in one step.

The arena is the device buffer that holds the captured rows of one step. The scheduler offers requests in its own order,
running ones first. A waiting request whose next token finds no room is skipped, so that requests that capture nothing
still start, but no other capturing request overtakes it in that step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_steer.compat.internals import RequestStatus
from vllm_steer.program import Resolved

Spans = list[tuple[int, int]]
"""Positions ``[start, stop)`` that must be computed in one step."""


class ArenaBudget:
    """Rows of the arena that are free in the step that is being scheduled.

    Args:
        rows: Size of the arena.
        drafts: Most draft tokens of a request in a step.
        speculates: Whether the engine uses speculative decoding. The positions of a request's next tokens are then
            known on the device only, so each token counts with the most rows that any token of the request stores.
    """

    def __init__(self, rows: int, drafts: int, speculates: bool) -> None:
        self.rows, self._drafts, self._speculates = rows, drafts, speculates
        self._free = rows
        self._closed = False
        self._rows_per_token: dict[str, int] = {}
        self._total_per_token = 0

    def add_request(self, request_id: str, resolved: Resolved) -> None:
        """Count an admitted request."""
        if resolved.max_captures:
            self._rows_per_token[request_id] = resolved.max_captures
            self._total_per_token += resolved.max_captures

    def remove_request(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._total_per_token -= self._rows_per_token.pop(request_id, 0)

    @property
    def guaranteed_tokens(self) -> int:
        """Number of tokens that all capturing requests can have in one step together: a decoding step's, or 0."""
        tokens = 1 + self._drafts
        return tokens if self._total_per_token * tokens <= self.rows else 0

    def begin_step(self) -> None:
        """Free the whole arena."""
        self._free, self._closed = self.rows, False

    def reason_impossible(self, resolved: Resolved, spans: Spans) -> str | None:
        """Return why a request can never be computed, or None if it can."""
        needed = resolved.max_captures * (1 + self._drafts)
        for start, stop in spans:
            needed = max(needed, self._rows_of(resolved, start, stop))
        if needed <= self.rows:
            return None
        return f"needs {needed} rows in one step; the engine has {self.rows} (--steering-capture-rows)"

    def fits_anywhere(self, resolved: Resolved, spans: Spans) -> bool:
        """Return whether a waiting request can have its next token, at whichever position it starts."""
        return not self._closed and not spans and resolved.max_captures * (1 + self._drafts) <= self._free

    def can_start(self, resolved: Resolved, position: int, spans: Spans) -> bool:
        """Return whether a waiting request that starts at ``position`` can have its next token.

        If a span begins or continues there, its rest needs room as a whole. If there is none, no other capturing
        request can start in this step.
        """
        needed = self._rows_of(resolved, position, position + 1) * (1 + self._drafts)
        for start, stop in spans:
            if start <= position < stop:
                needed = max(needed, self._rows_of(resolved, position, stop))
        self._closed = self._closed or needed > self._free
        return not self._closed

    def take(self, resolved: Resolved, start: int, tokens: int, whole: bool, spans: Spans) -> int:
        """Reserve the rows of up to ``tokens`` tokens from ``start`` on.

        Args:
            resolved: Program of the request.
            start: Position of the first token.
            tokens: Number of tokens that vLLM wants to compute.
            whole: Reserve all of them or none.
            spans: Spans of the request, none of which is split. The rest of one that contains ``start`` counts alike.

        Returns:
            The number of tokens whose rows have been reserved.
        """
        if start >= resolved.captured_range[1] and not self._speculates:
            return tokens
        if tokens == 1 and resolved.max_captures <= self._free:
            # Hot path: a decoding request, counted with the most that one token can store.
            self._free -= resolved.max_captures
            return tokens
        fitting, rows = self._fitting(resolved, start, tokens)
        if fitting < tokens:
            end = 0 if whole else _before_split(spans, start + fitting) - start
            fitting, rows = self._fitting(resolved, start, max(end, 0))
        self._free -= rows
        return fitting

    def _fitting(self, resolved: Resolved, start: int, tokens: int) -> tuple[int, int]:
        """Return how many of ``tokens`` tokens fit the free rows, and how many rows they take."""
        if self._speculates:
            tokens = min(tokens, self._free // resolved.max_captures)
            return tokens, tokens * resolved.max_captures
        taken = rows = 0
        for first, stop, segment in resolved.spans(start, start + tokens):
            count = stop - first
            if segment.num_captures:
                count = min(count, (self._free - rows) // segment.num_captures)
            taken += count
            rows += count * segment.num_captures
            if count < stop - first:
                break
        return taken, rows

    def _rows_of(self, resolved: Resolved, start: int, stop: int) -> int:
        if self._speculates:
            return (stop - start) * resolved.max_captures
        return sum((last - first) * segment.num_captures for first, last, segment in resolved.spans(start, stop))


class TokenLimiter:
    """Limits the tokens of vLLM's requests to what an :class:`ArenaBudget` has room for.

    While the arena holds the rows of any tokens of a step, nothing is limited. In most other steps the next tokens of
    all capturing requests fit together (:attr:`ArenaBudget.guaranteed_tokens`). Requests are then only recorded. Their
    rows are reserved (:meth:`_reserve_recorded`) when a capturing request wants more tokens or wants to start.

    Args:
        arena: Rows that are free in the step.
        with_program: Programs of requests, by request id.
        scheduler_config: vLLM's configuration of the scheduler.
        step_tokens: Most tokens of a step.
        whole_prompts: Whether each token of a prompt attends to all of them.
    """

    def __init__(
        self,
        arena: ArenaBudget,
        with_program: Mapping[str, Resolved],
        scheduler_config: Any,
        step_tokens: int,
        whole_prompts: bool = False,
    ) -> None:
        self._arena, self._with_program, self._scheduler_config = arena, with_program, scheduler_config
        self._step_tokens = step_tokens
        # Most rows that a token of a request stores, counted since no request had a program.
        self._most_captures = 0
        self._whole_prompts = whole_prompts
        self._recorded: list[tuple[Any, int, int]] = []
        self._recordable_tokens = 0
        self._limits = True

    def begin_step(self) -> bool:
        """Free the arena, and return whether the tokens of this step have to be limited."""
        self._arena.begin_step()
        self._recorded.clear()
        if not self._with_program:
            self._most_captures = 0
        self._limits = self._most_captures * self._step_tokens > self._arena.rows
        self._recordable_tokens = self._arena.guaranteed_tokens if self._limits else 0
        return self._limits

    def add_request(self, resolved: Resolved) -> None:
        """Count a request from its arrival on."""
        self._most_captures = max(self._most_captures, resolved.max_captures)

    def reason_impossible(self, request: Any, resolved: Resolved) -> str | None:
        """Return why a request can never be computed, or None if it can."""
        return self._arena.reason_impossible(resolved, self.spans(request)) if resolved.max_captures else None

    def limit(self, request: Any, start: int, tokens: int) -> int:
        """Return how many of ``tokens`` tokens from position ``start`` on a request gets."""
        if tokens <= self._recordable_tokens:
            self._recorded.append((request, start, tokens))
            return tokens
        resolved = self._with_program.get(request.request_id)
        if resolved is None or not resolved.max_captures:
            return tokens
        self._reserve_recorded()
        return self._take(request, resolved, start, tokens)

    def can_start(self, request: Any, resolved: Resolved, cached_tokens: Callable[[], int]) -> bool:
        """Return whether there is room for a waiting request where it starts, which may be after its cached tokens."""
        if not self._limits:
            return True
        self._reserve_recorded()
        start, spans = request.num_computed_tokens, self.spans(request)
        if not start and not self._arena.fits_anywhere(resolved, spans):
            start = cached_tokens()
        return self._arena.can_start(resolved, start, spans)

    def _reserve_recorded(self) -> None:
        """Reserve the rows of all recorded requests, and from now on in this step those of each request at once."""
        self._recordable_tokens = 0
        for request, start, tokens in self._recorded:
            resolved = self._with_program.get(request.request_id)
            if resolved is not None and resolved.max_captures:
                self._take(request, resolved, start, tokens)
        self._recorded.clear()

    def _take(self, request: Any, resolved: Resolved, start: int, tokens: int) -> int:
        # vLLM asserts that a request which it starts with draft tokens gets all of them.
        has_drafts = request.status != RequestStatus.RUNNING and start + tokens > request.num_tokens
        return self._arena.take(resolved, start, tokens, has_drafts, self.spans(request))

    def spans(self, request: Any) -> Spans:
        """Return the positions that a request needs in one step; see :func:`unsplit_spans`."""
        if self._whole_prompts:
            return [(0, request.num_prompt_tokens)]
        return unsplit_spans(request, self._scheduler_config) if request.mm_features else []


def unsplit_spans(request: Any, scheduler_config: Any) -> Spans:
    """Return the positions of each multimodal item that the model's attention needs in one step.

    vLLM keeps these together (``Scheduler._try_schedule_encoder_inputs``) before its last limit on a request's tokens.
    It does not keep the rest of an item together, so a request should not start within one.
    """
    if not scheduler_config.disable_chunked_mm_input:
        return []
    positions = [feature.mm_position for feature in request.mm_features]
    return [(position.offset, position.offset + position.length) for position in positions]


def block_ahead(spans: Spans, position: int, block_size: int) -> int:
    """Return the last start of a block at or before ``position`` that is not within a span."""
    start = position // block_size * block_size
    for first, last in sorted(spans, reverse=True):
        if first < start < last:
            start = first // block_size * block_size
    return start


def _before_split(spans: Spans, end: int) -> int:
    """Return ``end``, or the start of the span that it would split."""
    return min([end, *(first for first, last in spans if first < end < last)])
