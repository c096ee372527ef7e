# SPDX-License-Identifier: Apache-2.0
"""Steering and capture in ``vllm run-batch``, which reads requests from a file.

Captured rows are part of a line's response. Rows that are too large for it fail, because a batch run has no server from
which they could be fetched; the error recommends capturing to files.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import EngineContext, ensure_engine_context
from vllm_steer.server.capture_store import CaptureFormat
from vllm_steer.server.http.apply_fields import RequestRefused, refuse_fields, refused
from vllm_steer.server.http.capture_reports import RESULTS_FIELD, build_reports, error_report, missing_reports
from vllm_steer.server.http.field_scanner import find_fields
from vllm_steer.server.http.readout_feed import READOUTS_KEY, TRACE_KEY
from vllm_steer.server.http.request_context import APPLIED_FIELD, RequestContext, current_request
from vllm_steer.server.settings import store_limits

STEERABLE_URL = "/v1/chat/completions"
"""The only URL whose lines create sampling parameters through methods that this package wraps."""

Handler = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class _BatchContext:
    engine: EngineContext | None = None
    inline_bytes: int = 0
    response_bytes: int = 0


_current_batch: ContextVar[_BatchContext] = ContextVar("vllm_steer_batch", default=_BatchContext())  # noqa: B039


async def run(original: Handler, engine_client: Any, args: Any, *more: Any) -> None:
    """Run vLLM's ``run_batch``, with consumers created before the first line and closed after the last."""
    engine = await ensure_engine_context(engine_client)
    limits = store_limits(args)
    token = _current_batch.set(_BatchContext(engine, limits.inline_bytes, limits.response_bytes))
    try:
        await original(engine_client, args, *more)
    finally:
        _current_batch.reset(token)
        if engine is not None:
            await asyncio.to_thread(engine.capture_manager.close)


async def run_request_line(original: Handler, handler: Handler, request: Any, *more: Any) -> Any:
    """Run vLLM's ``run_request``. Errors that ``handler`` raises become errors of the line."""

    async def handle(body: Any, *args: Any, **kwargs: Any) -> Any:
        _check_fields(body, request.url)
        batch = _current_batch.get()
        context = RequestContext()  # without a store of captures
        token = current_request.set(context)
        try:
            await _use_engine(context, batch.engine)
            response = await handler(body, *args, **kwargs)
        finally:
            current_request.reset(token)
        applied = context.final_applied_json()
        if applied is not None and hasattr(response, "choices"):
            setattr(response, APPLIED_FIELD, msgspec.json.decode(applied))
        if context.consumers and hasattr(response, "choices"):
            reports = await build_reports(context, batch.inline_bytes, batch.response_bytes, _refuse_to_store)
            for number, choice in enumerate(response.choices):
                setattr(choice, RESULTS_FIELD, reports.get(number) or missing_reports(context))
        for number, feed in context.readouts.items():
            values = {READOUTS_KEY: feed.take_all(), TRACE_KEY: feed.take_trace()}
            for name, value in values.items():
                if value is not None and hasattr(response, "choices"):
                    setattr(response.choices[number], name, value)
        context.close()
        return response

    return await original(handle, request, *more)


async def _use_engine(context: RequestContext, engine: EngineContext | None) -> None:
    """Set the engine; raise ``RequestRefused`` if its registry cannot be read."""
    try:
        await context.use_engine(engine)
    except SteeringError as error:
        raise refused(error) from error


def _check_fields(body: Any, url: str) -> None:
    """Raise ``RequestRefused`` for fields that vLLM would ignore."""
    # The body is already parsed, so duplicate keys are not detected here.
    problem = find_fields(json.dumps(body.model_extra or {}, default=str).encode()).problem
    if problem is not None:
        raise RequestRefused(problem.field, problem.problem)
    if url != STEERABLE_URL:
        refuse_fields(body, f"lines for {url[:80]} do not support this field; use {STEERABLE_URL}")


async def _refuse_to_store(size: int, make: Callable[[], bytes], file_format: CaptureFormat) -> dict[str, Any]:
    return error_report(f"{size} bytes are too many for a batch line; raise --capture-inline-kib, or capture to files")
