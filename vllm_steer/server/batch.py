# SPDX-License-Identifier: Apache-2.0
"""``vllm run-batch``: lines of a file in the place of HTTP requests, served and refused as those are.

What was captured for a line stands in its answer's choices. There is nobody who could fetch anything later, so rows
beyond the size of an answer are refused, with the advice to capture them to files.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from vllm_steer.frontend.context import EngineContext, ensure_engine_context
from vllm_steer.server.capture_store import MediaKind
from vllm_steer.server.flags import store_limits
from vllm_steer.server.http.capture_reports import NAME, failed, no_results, reports_of
from vllm_steer.server.http.field_scanner import find_fields
from vllm_steer.server.http.request_context import RequestContext, current
from vllm_steer.server.http.request_fields import RequestRefused, refuse_fields

CARRYING_URL = "/v1/chat/completions"
"""The one kind of line whose request becomes sampling parameters through methods that we wrap."""

Handler = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class _Run:
    served: EngineContext | None
    inline_bytes: int
    response_bytes: int


_running: ContextVar[_Run | None] = ContextVar("vllm_steer_batch", default=None)


async def run(original: Handler, engine_client: Any, args: Any) -> None:
    """vLLM's ``run_batch`` with captures: consumers are made before the first line and closed after the last."""
    served = await ensure_engine_context(engine_client)
    limits = store_limits(args)
    token = _running.set(_Run(served, limits.inline_bytes, limits.response_bytes))
    try:
        await original(engine_client, args)
    finally:
        _running.reset(token)
        if served is not None:
            await asyncio.to_thread(served.capture_manager.close)


async def run_line(original: Handler, handler: Handler, request: Any, tracker: Any) -> Any:
    """vLLM's ``run_request``: its ``handler`` is given a line's body, and what it raises becomes the line's error."""

    async def handle(body: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse(body, request.url)
        exchange = RequestContext()
        batch = _running.get()
        if batch is not None:
            exchange.served = batch.served
        token = current.set(exchange)
        try:
            answer = await handler(body, *args, **kwargs)
        finally:
            current.reset(token)
        if exchange.consumers and hasattr(answer, "choices"):
            await _fill(answer.choices, exchange, batch or _Run(None, 0, 0))
        exchange.end()
        return answer

    return await original(handle, request, tracker)


def _refuse(body: Any, url: str) -> None:
    """Raise :class:`RequestRefused` for fields that would be ignored."""
    # Parsed already, so a key that stood twice is not seen here.
    problem = find_fields(json.dumps(body.model_extra or {}, default=str).encode()).problem
    if problem is not None:
        raise RequestRefused(problem.field, problem.problem)
    if url != CARRYING_URL:
        refuse_fields(body, f"lines for {url[:80]} do not carry it to the engine, so it would be ignored")


async def _fill(choices: list[Any], exchange: RequestContext, batch: _Run) -> None:
    reports = await reports_of(exchange, batch.inline_bytes, batch.response_bytes, _too_large)
    for number, choice in enumerate(choices):
        setattr(choice, NAME, reports.get(number) or no_results(exchange))


async def _too_large(size: int, make: Callable[[], bytes], kind: MediaKind) -> dict[str, Any]:
    return failed(f"{size} bytes are too many for a line; raise --capture-inline-kib, or capture to files")
