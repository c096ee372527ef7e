# SPDX-License-Identifier: Apache-2.0
"""Writer of this package's fields into the responses of vLLM's routes.

A JSON response gets ``steering_applied`` as its first field, and ``capture_results``, ``readouts`` and
``steering_trace`` in each choice, or at the top level (responses API). In a stream, the first event gets
``steering_applied``; the values of the tokens come with the events of their choice, of which those of completions and
chat completions are made with their values (:mod:`vllm_steer.server.http.stream_chunks`). What is known at the end only
becomes events of its own ahead of the end: capture results, values that no event has carried, edits without a token.
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
from vllm_steer.server.http.capture_reports import RESULTS_FIELD, build_reports, error_report, is_small, missing_reports
from vllm_steer.server.http.readout_feed import READOUTS_KEY, TRACE_KEY, ReadoutFeed
from vllm_steer.server.http.request_context import APPLIED_FIELD, RequestContext
from vllm_steer.server.http.result_waiter import wait_for_disconnect

_DONE = b"data: [DONE]\n\n"
_DATA = b"data: {"
_FINAL_EVENTS = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed")
_FEW_CHOICES = 4
"""Choices whose small reports are encoded in the event loop."""
_MANY_POSITIONS = 1 << 14
"""Positions from which on values are encoded in a thread, so that they do not delay the tokens of other requests."""
_DISCONNECT_LOOP_TURNS = 10
"""Turns of the event loop that suffice for a server to report a disconnect."""
_encoder = msgspec.json.Encoder()


class ResponseWriter:
    """ASGI ``send`` of one response. Errors and responses with a content encoding pass unchanged.

    Waiting for consumers delays this response only. If the client disconnects before the end of the response, its
    stored results are deleted.

    Args:
        context: State of the request.
        store: Returns the server's store of captures, for results that are too large for the response.
        receive: The request's ``receive``, which reports a disconnect.
        send: Sends the messages.
    """

    def __init__(
        self, context: RequestContext, store: Callable[[], CaptureStore], receive: Receive, send: Send
    ) -> None:
        self._context, self._get_store = context, store
        self._receive, self._send = receive, send
        self._start: Message | None = None
        """Start of a JSON response, held back because its length changes."""
        self._body: list[bytes] = []
        self._is_stream = self._has_begun = self._ended = False
        self._passes = False
        """Whether events before the end pass unchanged."""
        self._stored_ids: list[str] = []

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message of the application."""
        if self._passes and message.get("more_body", False) and not message.get("body", b"").endswith(_DONE):
            return self._send(message)  # hot path: each token of a stream
        return self._send_edge(message)

    async def _send_edge(self, message: Message) -> None:
        """Send the start of a response, the body of a JSON response, or an event that changes."""
        try:
            if message["type"] == "http.response.start":
                kind = MutableHeaders(scope=message).get("content-type", "")
                if message["status"] >= HTTPStatus.BAD_REQUEST or content_encoding(message):
                    self._passes = self._ended = True
                    kind = ""
                self._is_stream = kind.startswith("text/event-stream")
                if kind.startswith("application/json") or (kind and not self._is_stream and self._adds_results):
                    self._start = message
                    return
            elif self._is_stream:
                message = {**message, "body": await self._add_to_stream(message)}
            elif self._start is not None:
                self._body.append(message.get("body", b""))
                if not message.get("more_body", False):
                    await self._send_document(self._start, b"".join(self._body))
                return
            await self._send(message)
        except BaseException:
            self._delete_stored()
            raise

    @property
    def _adds_results(self) -> bool:
        return bool(self._context.consumers) or self._context.dynamic

    async def _add_to_stream(self, message: Message) -> bytes:
        """Return the bytes of a message of a stream with what belongs to its event, and with the last events."""
        body: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        if not self._passes:
            body = self._add_to_event(body)
        if self._ended or (more and not body.endswith(_DONE)):
            return body
        self._ended = True
        end = _DONE if body.endswith(_DONE) else b""
        body = body[: len(body) - len(end)]
        if self._context.consumers:
            if body:  # not delayed by the consumers
                await self._send({**message, "body": body, "more_body": True})
            body = await self._results_event()
            if self._stored_ids:
                await _yield_to_disconnect()  # a disconnect cancels this task here
        return b"".join((body, self._remaining_readouts(), self._unreached_event(), end))

    def _add_to_event(self, body: bytes) -> bytes:
        """Return an event with ``steering_applied``, if it is the first, and the values of a responses stream."""
        context = self._context
        at = 0 if body.startswith(_DATA) else body.find(b"\n" + _DATA) + 1
        if not body.startswith(_DATA, at):
            return body
        members: list[bytes] = []
        if not self._has_begun and context.applied_json is not None:
            members.append(b'"%b":%b' % (APPLIED_FIELD.encode(), context.applied_json))
        self._has_begun = True
        self._passes = not (context.dynamic and context.results_in == "response")
        if not self._passes and (feed := context.readouts.get(0)) is not None:
            members += feed.take_members(last=body.startswith(_FINAL_EVENTS))
        return _insert(body, at + len(_DATA), members)

    async def _results_event(self) -> bytes:
        """Return the event with capture results."""
        context = self._context
        reports = await self._build_reports()
        if context.results_in == "response":
            event: dict[str, Any] = {"type": RESULTS_FIELD, RESULTS_FIELD: reports.get(0) or missing_reports(context)}
            prefix = b"event: " + RESULTS_FIELD.encode() + b"\ndata: "
        else:
            # Report every expected choice, as a JSON response does, even if it ended without a result.
            numbers = sorted({*reports, *range(context.prompts * context.samples)})
            choices = [{"index": n, RESULTS_FIELD: reports.get(n) or missing_reports(context)} for n in numbers]
            event, prefix = {"object": RESULTS_FIELD, "choices": choices}, b"data: "
        small = len(reports) <= _FEW_CHOICES and all(map(is_small, reports.values()))
        return b"".join((prefix, _encode(event) if small else await asyncio.to_thread(_encode, event), b"\n\n"))

    def _remaining_readouts(self) -> bytes:
        """Return an event with the values that no other event of the stream has carried, or nothing."""
        readouts = sorted(self._context.readouts.items())
        found = {number: members for number, feed in readouts if (members := feed.take_members(last=True))}
        if not found:
            return b""
        if self._context.results_in == "response":
            return b'event: readouts\ndata: {"type":"readouts",%b}\n\n' % b",".join(found[0])
        choices = [b'{"index":%d,%b}' % (number, b",".join(members)) for number, members in found.items()]
        return b'data: {"object":"readouts","choices":[%b]}\n\n' % b",".join(choices)

    def _unreached_event(self) -> bytes:
        """Return an event with the complete ``steering_applied`` if some edits have reached no token, or nothing."""
        context, name = self._context, APPLIED_FIELD.encode()
        # Plain requests under global steering keep the events of the route, which may not be OpenAI's.
        if context.applied_json is None or not context.fields_applied or not any(context.unreached.values()):
            return b""
        value = context.final_applied_json() or b"null"
        if context.results_in == "response":
            return b'event: %b\ndata: {"type":"%b","%b":%b}\n\n' % (name, name, name, value)
        return b'data: {"object":"%b","choices":[],"%b":%b}\n\n' % (name, name, value)

    async def _send_document(self, start: Message, body: bytes) -> None:
        """Send a JSON response with its fields, unless the client leaves while they are made."""
        status: int = start["status"]
        if self._adds_results:
            building = asyncio.ensure_future(self._add_to_choices(status, body))
            disconnected = asyncio.ensure_future(wait_for_disconnect(self._receive))
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
        if body.startswith(b"{") and (applied := self._context.final_applied_json()) is not None:
            body = _insert(body, 1, [b'"%b":%b' % (APPLIED_FIELD.encode(), applied)])
        start = {**start, "status": status, "headers": list(start["headers"])}
        MutableHeaders(scope=start)["content-length"] = str(len(body))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})

    async def _add_to_choices(self, status: int, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the response with capture results and readouts."""
        context = self._context
        try:
            document = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            carriers = [document]
            if context.results_in == "choices":
                carriers = msgspec.json.decode(document["choices"], type=list[dict[str, msgspec.Raw]])
        except (msgspec.MsgspecError, KeyError):
            name = RESULTS_FIELD.partition("_")[0] if context.consumers else READOUTS_KEY
            problem = f"`{name}`: the response of this route has no choices that could carry results"
            error = {"message": problem, "type": "InternalServerError", "param": name, "code": 500}
            return HTTPStatus.INTERNAL_SERVER_ERROR.value, _encode({"error": error})
        reports = await self._build_reports() if context.consumers else {}
        # By place, not by `index`: the batch route numbers conversations, each with `n` choices.
        for number, carrier in enumerate(carriers):
            if context.consumers:
                report = reports.get(number) or missing_reports(context)
                small = len(reports) <= _FEW_CHOICES and is_small(report)
                carrier[RESULTS_FIELD] = msgspec.Raw(
                    _encode(report) if small else await asyncio.to_thread(_encode, report)
                )
            if (feed := context.readouts.get(number)) is not None:
                carrier.update(await _encode_all(feed))
        if context.results_in == "choices":
            document["choices"] = msgspec.Raw(_encoder.encode(carriers))
        return status, _encoder.encode(document)

    async def _build_reports(self) -> dict[int, dict[str, Any]]:
        limits = self._get_store().limits
        return await build_reports(self._context, limits.inline_bytes, limits.response_bytes, self._store_report)

    async def _store_report(self, size: int, make: Callable[[], bytes], file_format: CaptureFormat) -> dict[str, Any]:
        """Store data that is too large for the response; return how to fetch it, or the error."""
        store = self._get_store()
        try:
            await asyncio.to_thread(store.check_room, size)
            data = await asyncio.to_thread(make)
            stored_id = await store.put_async(data, file_format, self._context.owner, self._context.store_bytes)
        except StoreFullError as error:
            return error_report(str(error))
        self._stored_ids.append(stored_id)
        expires_in = store.limits.expiry_seconds
        return {"id": stored_id, "bytes": len(data), "format": file_format, "expires_in": expires_in}

    def _delete_stored(self) -> None:
        for stored_id in self._stored_ids:
            self._get_store().delete(stored_id, self._context.owner)
        self._stored_ids.clear()


def content_encoding(start: Message) -> str:
    """Return the content encoding of a response, or an empty string if it has none."""
    encoding = MutableHeaders(scope=start).get("content-encoding", "identity")
    return "" if encoding == "identity" else encoding


def _insert(body: bytes, at: int, members: list[bytes]) -> bytes:
    """Return JSON with members inserted behind the ``{`` that ends at ``at``."""
    if not members:
        return body
    comma = b"" if body[at : at + 64].lstrip().startswith(b"}") else b","
    return b"".join((body[:at], b",".join(members), comma, body[at:]))


async def _yield_to_disconnect() -> None:
    """Let the event loop report a disconnect that happened while results were built."""
    for _ in range(_DISCONNECT_LOOP_TURNS):
        await asyncio.sleep(0)


async def _encode_all(feed: ReadoutFeed) -> dict[str, msgspec.Raw]:
    """Return all readouts of a sample that has ended, and its trace."""
    values = feed.take_all()
    fields = {READOUTS_KEY: values, TRACE_KEY: feed.take_trace()}
    given = {name: value for name, value in fields.items() if value is not None}
    if sum(len(each["positions"]) for each in values.values()) < _MANY_POSITIONS:
        return {name: msgspec.Raw(_encoder.encode(value)) for name, value in given.items()}
    return {name: msgspec.Raw(await asyncio.to_thread(_encoder.encode, value)) for name, value in given.items()}


def _encode(document: Mapping[str, Any]) -> bytes:
    """Return JSON; unpaired surrogates, which UTF-8 cannot encode, become escapes."""
    try:
        return _encoder.encode(document)
    except (ValueError, TypeError):  # unpaired surrogates, or a subclass of a type that JSON has
        text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")
