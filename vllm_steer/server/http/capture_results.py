# SPDX-License-Identifier: Apache-2.0
"""Writer of capture results into the responses of vLLM's routes.

A JSON response gets ``capture_results`` in each choice, or at the top level (responses API). A stream gets one more
event before its end. Results that are too large are stored, and the response has the id to fetch them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Send

from vllm_steer.server.capture_store import CaptureFormat, CaptureStore, StoreFullError
from vllm_steer.server.http.applied_field import DONE
from vllm_steer.server.http.capture_reports import RESULTS_FIELD, build_reports, error_report, is_small, missing_reports
from vllm_steer.server.http.request_context import RequestContext, ResultsLocation

_FEW_CHOICES = 4
"""Choices whose small reports are encoded in the event loop."""
_encoder = msgspec.json.Encoder()
_DISCONNECT_LOOP_TURNS = 10
"""Turns of the event loop that suffice for a server to report a disconnect."""


class CaptureResultWriter:
    """Wrapper of one request's ASGI ``send`` that adds capture results to the response.

    Waiting for consumers delays this response only. If the client disconnects before the end of the response, its
    stored results are deleted.
    """

    def __init__(self, context: RequestContext, store: CaptureStore, receive: Receive, send: Send) -> None:
        self._context, self._store = context, store
        self._receive, self._send = receive, send
        self._start: Message = {}
        self._is_stream = False
        self._body: list[bytes] = []
        self._stored_ids: list[str] = []
        self._results_sent = False

    def send(self, message: Message) -> Awaitable[None]:
        """Handle one ASGI message of the application."""
        if self._is_stream and message.get("more_body", False) and not message.get("body", b"").endswith(DONE):
            return self._send(message)  # hot path: each token of a stream
        return self._send_edge(message)

    async def _send_edge(self, message: Message) -> None:
        """Handle the start of a response, the body of a JSON response, or the end of a stream."""
        try:
            if message["type"] == "http.response.start":
                self._start = message
                self._is_stream = MutableHeaders(scope=message).get("content-type", "").startswith("text/event-stream")
                if self._is_stream:
                    await self._send(message)
            elif self._is_stream:
                await self._send_stream_chunk(message)
            else:
                self._body.append(message.get("body", b""))
                if not message.get("more_body", False):
                    await self._send_json(b"".join(self._body))
        except BaseException:
            self._delete_stored()
            raise

    async def _send_stream_chunk(self, message: Message) -> None:
        body = message.get("body", b"")
        ends_stream = body.endswith(DONE)
        if not self._results_sent and (ends_stream or not message.get("more_body", False)):
            before, after = (body[: -len(DONE)], DONE) if ends_stream else (body, b"")
            if before:
                await self._send({**message, "body": before, "more_body": True})
            message = {**message, "body": await self._results_event() + after}
            if self._stored_ids:
                await _yield_to_disconnect()  # a disconnect cancels this task here
        await self._send(message)
        self._results_sent = self._results_sent or ends_stream

    async def _send_json(self, body: bytes) -> None:
        building = asyncio.ensure_future(self._add_results(body))
        disconnected = asyncio.ensure_future(self._wait_for_disconnect())
        try:
            await asyncio.wait((building, disconnected), return_when=asyncio.FIRST_COMPLETED)
            await _yield_to_disconnect()
            client_left = disconnected.done()
        finally:
            disconnected.cancel()
            if not building.done():
                building.cancel()
            await asyncio.gather(disconnected, building, return_exceptions=True)
        if client_left:
            self._delete_stored()
            return
        status, body = building.result()
        start = {**self._start, "status": status, "headers": list(self._start["headers"])}
        MutableHeaders(scope=start)["content-length"] = str(len(body))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})

    async def _add_results(self, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the response with results."""
        parsed = await asyncio.to_thread(_parse_response, body, self._context.results_in)
        if parsed is None:
            problem = "`capture`: the response of this route has no choices that could carry results"
            error = {"message": problem, "type": "InternalServerError", "param": "capture", "code": 500}
            return HTTPStatus.INTERNAL_SERVER_ERROR.value, _encode({"error": error})
        document, carriers = parsed
        reports = await self._build_reports()
        # By place, not by `index`: the batch route numbers conversations, each with `n` choices.
        for number, carrier in enumerate(carriers):
            carrier[RESULTS_FIELD] = reports.get(number) or missing_reports(self._context)
        return self._start["status"], await asyncio.to_thread(_encode, document)

    async def _results_event(self) -> bytes:
        """Return the last event of a stream."""
        context = self._context
        reports = await self._build_reports()
        if context.results_in == "response":
            event: dict[str, Any] = {"type": RESULTS_FIELD, RESULTS_FIELD: reports.get(0) or missing_reports(context)}
            return b"event: " + RESULTS_FIELD.encode() + b"\ndata: " + await _encode_event(event, reports) + b"\n\n"
        # Report every expected choice, as a JSON response does, even if it ended without a result.
        numbers = sorted({*reports, *range(context.prompts * context.samples)})
        choices = [{"index": n, RESULTS_FIELD: reports.get(n) or missing_reports(context)} for n in numbers]
        event = {"object": RESULTS_FIELD, "choices": choices}
        return b"data: " + await _encode_event(event, reports) + b"\n\n"

    async def _build_reports(self) -> dict[int, dict[str, Any]]:
        limits = self._store.limits
        return await build_reports(self._context, limits.inline_bytes, limits.response_bytes, self._store_report)

    async def _store_report(self, size: int, make: Callable[[], bytes], file_format: CaptureFormat) -> dict[str, Any]:
        """Store data that is too large for the response; return how to fetch it, or the error."""
        try:
            await asyncio.to_thread(self._store.check_room, size)
            data = await asyncio.to_thread(make)
            stored_id = await self._store.put_async(data, file_format, self._context.owner, self._context.store_bytes)
        except StoreFullError as error:
            return error_report(str(error))
        self._stored_ids.append(stored_id)
        expires_in = self._store.limits.expiry_seconds
        return {"id": stored_id, "bytes": len(data), "format": file_format, "expires_in": expires_in}

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _delete_stored(self) -> None:
        for stored_id in self._stored_ids:
            self._store.delete(stored_id, self._context.owner)
        self._stored_ids.clear()


async def _yield_to_disconnect() -> None:
    """Let the event loop report a disconnect that happened while results were built."""
    for _ in range(_DISCONNECT_LOOP_TURNS):
        await asyncio.sleep(0)


def _parse_response(body: bytes, results_in: ResultsLocation) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """Parse a JSON response.

    Returns:
        The document and the objects in it that carry results, in choice order; None if there are none.
    """
    try:
        document = json.loads(body)
    except ValueError:
        return None
    if not isinstance(document, dict):
        return None
    carriers = [document] if results_in == "response" else document.get("choices")
    return (document, carriers) if isinstance(carriers, list) else None


async def _encode_event(event: dict[str, Any], reports: Mapping[int, Mapping[str, Any]]) -> bytes:
    """Return the JSON of an event, encoded in a thread unless its reports are small."""
    if len(reports) > _FEW_CHOICES or not all(map(is_small, reports.values())):
        return await asyncio.to_thread(_encode, event)
    try:
        return _encoder.encode(event)
    except (ValueError, TypeError):  # unpaired surrogates, or a subclass of a type that JSON has
        return _encode(event)


def _encode(document: dict[str, Any]) -> bytes:
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Unpaired surrogates, which UTF-8 cannot encode, become JSON escapes.
    return text.encode("utf-8", "backslashreplace")
