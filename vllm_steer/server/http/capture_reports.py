# SPDX-License-Identifier: Apache-2.0
"""What an answer says about the captures of its request: by choice and by consumer, in JSON's types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from vllm_steer.capture import CapturedRequest, CaptureResult
from vllm_steer.capture.results import CaptureResults
from vllm_steer.server.capture_store import CaptureFormat
from vllm_steer.server.http.request_context import RequestContext
from vllm_steer.server.http.row_encoding import file_of, inline

NAME = "capture_results"
REPORT_BYTES = 64 << 10
"""What a consumer itself reports is part of the answer up to this size, however few rows are."""

Keep = Callable[[int, Callable[[], bytes], CaptureFormat], Awaitable[dict[str, Any]]]
"""What is to be done with something that is too large for the answer, given its size and how to make its bytes; returns
what the answer says instead of it, with ``status`` and ``error`` where it cannot be had."""


async def reports_of(
    context: RequestContext, inline_bytes: int, response_bytes: int, keep: Keep
) -> dict[int, dict[str, Any]]:
    """What the consumers have to say, by choice and consumer; waits for them without blocking.

    Rows are part of the answer up to ``inline_bytes`` by choice and consumer, and ``response_bytes`` in all.
    """
    reports: dict[int, dict[str, Any]] = {}
    for choice, results in context.results.items():
        if choice in context.rerun_choices:
            reports[choice] = {name: failed(_REPEATED) for name in results}
            continue
        reports[choice] = {}
        for name, result in (await _settled(results)).items():
            reports[choice][name] = await _report(result, min(inline_bytes, response_bytes), keep)
            if "sites" in reports[choice][name]:
                response_bytes -= result.data.num_bytes
    return reports


def no_results(context: RequestContext) -> dict[str, Any]:
    """The report on a choice of which nothing is known."""
    return {name: failed("this choice ended without a result") for name in context.consumers}


def failed(reason: str) -> dict[str, Any]:
    """The report on a capture of which there is nothing to give."""
    return {"status": "error", "error": reason}


_REPEATED = "the answer took several runs of the model (tools of the server), and which one is meant is not defined"


async def _report(result: CaptureResult, inline_bytes: int, keep: Keep) -> dict[str, Any]:
    """``status`` and ``error`` always; with rows ``sites``, as :func:`inline` says; or else ``data``, what the consumer
    reported, if it did; and where either is too large, what ``keep`` says."""
    head = {"status": result.status, "error": result.error}
    data = result.data
    if data is None:
        return head
    if isinstance(data, CapturedRequest):
        if data.num_bytes <= inline_bytes:
            return {**head, "sites": await asyncio.to_thread(inline, data)}
        return {**head, **await keep(data.num_bytes, lambda: file_of(data), "safetensors")}
    try:
        text = await asyncio.to_thread(json.dumps, data, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return failed(f"the consumer has the rows, but its report cannot be written as JSON: {error}")
    if len(text) <= max(inline_bytes, REPORT_BYTES):
        return {**head, "data": data}
    return {**head, **await keep(len(text), text.encode, "json")}


async def _settled(results: CaptureResults) -> dict[str, CaptureResult]:
    """Shielded: a consumer's work is not called off because the client has left."""
    waiting = (asyncio.shield(asyncio.wrap_future(future)) for future in results.futures.values())
    return dict(zip(results.futures, await asyncio.gather(*waiting), strict=True))
