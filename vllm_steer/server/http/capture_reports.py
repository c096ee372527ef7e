# SPDX-License-Identifier: Apache-2.0
"""Capture results of a request as JSON types: one report per choice and consumer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from vllm_steer.capture import CapturedRequest, CaptureResult
from vllm_steer.capture.files.tensors import encode_request
from vllm_steer.server.capture_store import CaptureFormat
from vllm_steer.server.http.request_context import RERUN, RequestContext
from vllm_steer.server.http.result_waiter import wait_for

RESULTS_FIELD = "capture_results"
MIN_INLINE_REPORT_BYTES = 64 << 10
"""Size up to which a consumer's own report is always part of the response."""

SMALL_BYTES = 32 << 10
"""Captured rows up to this size are encoded in the event loop: passing them to a thread takes longer."""
_SHORT_FIELDS, _SHORT_TEXT = 8, 4096

StoreReport = Callable[[int, Callable[[], bytes], CaptureFormat], Awaitable[dict[str, Any]]]
"""Stores data that is too large for the response. Called with the size and a function that returns the bytes; returns
the fields to report instead, including ``status`` and ``error`` on failure."""


async def build_reports(
    context: RequestContext, inline_bytes: int, response_bytes: int, store: StoreReport
) -> dict[int, dict[str, Any]]:
    """Wait for the consumers of a request and build their reports.

    Args:
        context: The request.
        inline_bytes: Most bytes of rows in one report.
        response_bytes: Most bytes of rows in the whole response.
        store: Stores rows and reports beyond these limits.

    Returns:
        Reports by choice and consumer.
    """
    reports: dict[int, dict[str, Any]] = {}
    if context.store_rows:
        inline_bytes = 0
    # A choice can finish while this waits for the consumers of another one.
    while finished := sorted(context.results.keys() - reports.keys()):
        for choice in finished:
            results = context.results[choice]
            if choice in context.rerun_choices:
                reports[choice] = {name: error_report(RERUN) for name in results}
                continue
            reports[choice] = {}
            for name, future in results.futures.items():
                result = await wait_for(future)
                reports[choice][name] = report = await _build_report(result, min(inline_bytes, response_bytes), store)
                if "sites" in report:
                    response_bytes -= result.data.num_bytes
    return reports


def missing_reports(context: RequestContext) -> dict[str, Any]:
    """Return the reports of a choice that ended without results."""
    return {name: error_report("this choice ended without a result") for name in context.consumers}


def error_report(reason: str) -> dict[str, Any]:
    """Return the report of a failed capture."""
    return {"status": "error", "error": reason}


async def _build_report(result: CaptureResult, inline_bytes: int, store: StoreReport) -> dict[str, Any]:
    """Return status and error, and ``sites`` (rows), ``data`` (the consumer's report), or the fields of ``store``."""
    report: dict[str, Any] = {"status": result.status, "error": result.error}
    if result.unreached:
        report["unreached"] = result.unreached
    data = result.data
    if data is None:
        return report
    if isinstance(data, CapturedRequest):
        if data.num_bytes <= inline_bytes and inline_bytes > 0:
            small = data.num_bytes <= SMALL_BYTES
            return {**report, "sites": encode_inline(data) if small else await asyncio.to_thread(encode_inline, data)}
        return {**report, **await store(data.num_bytes, lambda: b"".join(encode_request(data)), "safetensors")}
    if _is_short(data):
        return {**report, "data": data}
    try:
        text = await asyncio.to_thread(json.dumps, data, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return error_report(f"the consumer received the rows, but its report is not valid JSON: {error}")
    if len(text) <= max(inline_bytes, MIN_INLINE_REPORT_BYTES):
        return {**report, "data": data}
    return {**report, **await store(len(text), text.encode, "json")}


def encode_inline(captured: CapturedRequest) -> dict[str, dict[str, Any]]:
    """Return the rows as ``{point: {layer: rows}}``."""
    sites: dict[str, dict[str, Any]] = {}
    for (point, layer), rows in captured.sites.items():
        sites.setdefault(point, {})[str(layer)] = rows.to_json()
    return sites


def is_small(reports: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether encoding the reports of a choice takes less time than passing them to a thread."""
    return all(
        sum(len(rows["data"]) for point in report["sites"].values() for rows in point.values()) <= 2 * SMALL_BYTES
        if "sites" in report
        else _is_short(report.get("data", {}))
        for report in reports.values()
    )


def _is_short(data: object) -> bool:
    """Return whether a consumer's report is a flat dictionary of a few short strings and whole numbers."""
    return (
        type(data) is dict
        and len(data) <= _SHORT_FIELDS
        and all(isinstance(name, str) and _is_short_value(value) for name, value in data.items())
    )


def _is_short_value(value: object) -> bool:
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    return value is None or (isinstance(value, str) and len(value) <= _SHORT_TEXT)
