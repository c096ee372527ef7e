# SPDX-License-Identifier: Apache-2.0
"""Putting what was captured into an answer that vLLM's serving code has made without it.

A JSON answer gets ``capture_results`` in each of its choices, or, from the responses API, at its top; a stream gets one
more event before its end. What is large goes into the store, and the answer says under which id.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Send

from vllm_steer.server.capture_store import CaptureFormat, CaptureStore, StoreFullError
from vllm_steer.server.http.capture_reports import NAME, failed, no_results, reports_of
from vllm_steer.server.http.request_context import RequestContext, ResultsLocation

_DONE = b"data: [DONE]\n\n"
_TURNS = 10
"""Turns of the event loop in which a server reads a connection's end and tells whoever waits for it, and to spare."""


class CaptureResultWriter:
    """The answer to one request with captures; :meth:`send` takes the place of the server's own.

    Waiting for consumers holds up this answer and nothing else. What was stored for a client that did not stay to
    the end of the answer is discarded.
    """

    def __init__(self, context: RequestContext, store: CaptureStore, receive: Receive, send: Send) -> None:
        self._context, self._store = context, store
        self._receive, self._send = receive, send
        self._start: Message = {}
        self._is_stream = False
        self._pieces: list[bytes] = []
        self._stored: list[str] = []
        self._delivered = False

    async def send(self, message: Message) -> None:
        """Take one ASGI message of the application."""
        try:
            if message["type"] == "http.response.start":
                self._start = message
                self._is_stream = MutableHeaders(scope=message).get("content-type", "").startswith("text/event-stream")
                if self._is_stream:
                    await self._send(message)
            elif self._is_stream:
                await self._pass_piece(message)
            else:
                self._pieces.append(message.get("body", b""))
                if not message.get("more_body", False):
                    await self._answer(b"".join(self._pieces))
        except BaseException:
            self._discard()
            raise

    async def _pass_piece(self, message: Message) -> None:
        body = message.get("body", b"")
        at_end = body.endswith(_DONE)
        if not self._delivered and (at_end or not message.get("more_body", False)):
            before, after = (body[: -len(_DONE)], _DONE) if at_end else (body, b"")
            if before:
                await self._send({**message, "body": before, "more_body": True})
            message = {**message, "body": await self._event() + after}
            await _hear_of_leaving()  # by being cancelled
        await self._send(message)
        self._delivered = self._delivered or at_end

    async def _answer(self, body: bytes) -> None:
        made = asyncio.ensure_future(self._fill(body))
        left = asyncio.ensure_future(self._client_leaves())
        try:
            await asyncio.wait((made, left), return_when=asyncio.FIRST_COMPLETED)
            await _hear_of_leaving()
            client_left = left.done()
        finally:
            left.cancel()
            if not made.done():
                made.cancel()
            await asyncio.gather(left, made, return_exceptions=True)
        if client_left:
            self._discard()
            return
        status, filled = made.result()
        start = {**self._start, "status": status, "headers": list(self._start["headers"])}
        MutableHeaders(scope=start)["content-length"] = str(len(filled))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": filled})

    async def _fill(self, body: bytes) -> tuple[int, bytes]:
        found = await asyncio.to_thread(_document, body, self._context.results_in)
        if found is None:
            problem = "capture: this route's answer has no choices that could carry what was captured"
            error = {"message": problem, "type": "InternalServerError", "param": "capture", "code": 500}
            return HTTPStatus.INTERNAL_SERVER_ERROR.value, _encode({"error": error})
        document, places = found
        reports = await self._reports()
        # By place, not by the index that a choice states: the batch route states the conversation's, `n` times.
        for number, place in enumerate(places):
            place[NAME] = reports.get(number) or no_results(self._context)
        return self._start["status"], await asyncio.to_thread(_encode, document)

    async def _event(self) -> bytes:
        """The last event of a stream."""
        reports = await self._reports()
        if self._context.results_in == "response":
            event = {"type": NAME, NAME: reports.get(0) or no_results(self._context)}
            return b"event: " + NAME.encode() + b"\ndata: " + await asyncio.to_thread(_encode, event) + b"\n\n"
        # All that were to come, as in a JSON answer: one that ended ahead of its result is not to be missing.
        there = sorted({*reports, *range(self._context.prompts * self._context.samples)})
        choices = [{"index": index, NAME: reports.get(index) or no_results(self._context)} for index in there]
        return b"data: " + await asyncio.to_thread(_encode, {"object": NAME, "choices": choices}) + b"\n\n"

    async def _reports(self) -> dict[int, dict[str, Any]]:
        limits = self._store.limits
        return await reports_of(self._context, limits.inline_bytes, limits.response_bytes, self._keep)

    async def _keep(self, size: int, make: Callable[[], bytes], kind: CaptureFormat) -> dict[str, Any]:
        """Put what is too large for the answer into the store: how to fetch it, or why not."""
        try:
            await asyncio.to_thread(self._store.check_room, size)
            data = await asyncio.to_thread(make)
            handle = await self._store.put_async(data, kind, self._context.owner, self._context.store_bytes)
        except StoreFullError as error:
            return failed(str(error))
        self._stored.append(handle)
        return {"id": handle, "bytes": len(data), "format": kind, "expires_in": self._store.limits.expiry_seconds}

    async def _client_leaves(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _discard(self) -> None:
        for handle in self._stored:
            self._store.delete(handle, self._context.owner)
        self._stored.clear()


async def _hear_of_leaving() -> None:
    """Let the event loop tell of a client that left while rows were put together; once sent, they are the client's."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def _document(body: bytes, answer: ResultsLocation) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """A JSON answer and the objects in it that carry results, in order of the choices; None where there are none."""
    try:
        document = json.loads(body)
    except ValueError:
        return None
    if not isinstance(document, dict):
        return None
    places = [document] if answer == "response" else document.get("choices")
    return (document, places) if isinstance(places, list) else None


def _encode(document: dict[str, Any]) -> bytes:
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Half surrogate pairs, which UTF-8 cannot express, become JSON escapes.
    return text.encode("utf-8", "backslashreplace")
