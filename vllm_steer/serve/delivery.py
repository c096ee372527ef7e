# SPDX-License-Identifier: Apache-2.0
"""Putting what was captured into an answer that vLLM's serving code has made without it.

A JSON answer gets ``capture_results`` in each of its choices; a stream gets one more event before its end, of object
``capture_results``. Large rows go into the store, and the answer says under which id.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Send

from vllm_steer.capture import CapturedRequest, CaptureResult
from vllm_steer.capture.desk import CaptureResults
from vllm_steer.serve.exchange import Exchange
from vllm_steer.serve.rows import failed, file_of, report
from vllm_steer.serve.store import CaptureStore, StoreFullError

NAME = "capture_results"
_DONE = b"data: [DONE]\n\n"


class Delivery:
    """The answer to one request with captures; :meth:`send` takes the place of the server's own.

    Waiting for consumers holds up this answer and nothing else. What was stored for a client that did not stay to
    the end of the answer is discarded.
    """

    def __init__(self, exchange: Exchange, store: CaptureStore, receive: Receive, send: Send) -> None:
        self._exchange, self._store = exchange, store
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
            reports = await self._reports()
            choices = [{"index": index, NAME: reports[index]} for index in sorted(reports)]
            event = await asyncio.to_thread(_encode, {"object": NAME, "choices": choices})
            message = {**message, "body": b"data: " + event + b"\n\n" + after}
        await self._send(message)
        self._delivered = self._delivered or at_end

    async def _answer(self, body: bytes) -> None:
        made = asyncio.ensure_future(self._fill(body))
        left = asyncio.ensure_future(self._client_leaves())
        try:
            await asyncio.wait((made, left), return_when=asyncio.FIRST_COMPLETED)
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
        document = await asyncio.to_thread(_choices_document, body)
        if document is None:
            problem = "capture: this route's answer has no choices that could carry what was captured"
            error = {"message": problem, "type": "InternalServerError", "param": "capture", "code": 500}
            return HTTPStatus.INTERNAL_SERVER_ERROR.value, _encode({"error": error})
        reports = await self._reports()
        # By place, not by the index that a choice states: the batch route states the conversation's, `n` times.
        for place, choice in enumerate(document["choices"]):
            choice[NAME] = reports.get(place) or self._nothing()
        return self._start["status"], await asyncio.to_thread(_encode, document)

    def _nothing(self) -> dict[str, Any]:
        return {name: failed("this choice ended without a result") for name in self._exchange.consumers}

    async def _reports(self) -> dict[int, dict[str, Any]]:
        """What the consumers have to say, by choice and consumer."""
        reports = {}
        for choice, results in self._exchange.results.items():
            settled = await _settled(results)
            reports[choice] = {name: await self._report(result) for name, result in settled.items()}
        return reports

    async def _report(self, result: CaptureResult) -> dict[str, Any]:
        rows = result.data
        if not isinstance(rows, CapturedRequest) or rows.num_bytes <= self._store.limits.inline_bytes:
            return await asyncio.to_thread(report, result)
        try:
            self._store.check_room(rows.num_bytes)
            data = await asyncio.to_thread(file_of, rows)
            handle = self._store.put(data)
        except StoreFullError as error:
            return failed(str(error))
        self._stored.append(handle)
        return {
            "status": result.status,
            "error": result.error,
            "id": handle,
            "bytes": len(data),
            "expires_in": self._store.limits.expiry_seconds,
        }

    async def _client_leaves(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _discard(self) -> None:
        for handle in self._stored:
            self._store.discard(handle)
        self._stored.clear()


async def _settled(results: CaptureResults) -> dict[str, CaptureResult]:
    """Every consumer's result, waited for without blocking.

    Shielded: a consumer's work is not called off because the client has left.
    """
    waiting = (asyncio.shield(asyncio.wrap_future(future)) for future in results.futures.values())
    return dict(zip(results.futures, await asyncio.gather(*waiting), strict=True))


def _choices_document(body: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(body)
    except ValueError:
        return None
    return document if isinstance(document, dict) and isinstance(document.get("choices"), list) else None


def _encode(document: dict[str, Any]) -> bytes:
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Half surrogate pairs, which UTF-8 cannot express, become JSON escapes.
    return text.encode("utf-8", "backslashreplace")
