# SPDX-License-Identifier: Apache-2.0
"""Writer of readouts into the responses of vLLM's routes.

A JSON response gets ``readouts`` and ``steering_trace`` in each choice, or at the top level (responses API). In a
stream, each event carries the values of the tokens since the last event of its choice, and the last event of a choice
carries the trace.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

from vllm_steer.server.http.applied_field import DONE
from vllm_steer.server.http.readout_feed import READOUTS_KEY, TRACE_KEY, ReadoutFeed
from vllm_steer.server.http.request_context import RequestContext

# Quotes inside JSON strings are escaped, so these bytes are keys of the event, and the first ones at its top level.
_CHOICES = b'"choices":[{'
_INDEX = b'"index":'
_FINISHED = b'"finish_reason":"'
_DATA = b"data: {"
_LAST_EVENTS = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed")
_MANY_POSITIONS = 1 << 14
"""Positions from which on values are encoded in a thread, so that they do not delay the tokens of other requests."""
_encoder = msgspec.json.Encoder()


class ReadoutWriter:
    """ASGI ``send`` that adds the readouts to one response without a content encoding."""

    def __init__(self, context: RequestContext, send: Send) -> None:
        self._context, self._send = context, send
        self._start: Message | None = None
        self._is_stream = self._ended = False
        self._body: list[bytes] = []

    async def send(self, message: Message) -> None:
        """Send a message of the application."""
        if message["type"] == "http.response.start":
            self._is_stream = MutableHeaders(scope=message).get("content-type", "").startswith("text/event-stream")
            if not self._is_stream:
                self._start = message  # held back: its content-length changes
                return
        elif self._is_stream:
            body = self._add_to_event(message.get("body", b""), message.get("more_body", False))
            message = {**message, "body": body}
        elif self._start is not None:
            self._body.append(message.get("body", b""))
            if message.get("more_body", False):
                return
            status, body = await self._add_to_json(b"".join(self._body))
            start = {**self._start, "status": status, "headers": list(self._start["headers"])}
            MutableHeaders(scope=start)["content-length"] = str(len(body))
            await self._send(start)
            message = {"type": "http.response.body", "body": body}
        await self._send(message)

    def _add_to_event(self, body: bytes, more_body: bool) -> bytes:
        """Return the bytes of an event with the new values of its choice, and with the remaining ones at the end."""
        ends = body.endswith(DONE)
        if self._context.results_in == "response":
            body = self._add_to_response_event(body)
        else:
            body = self._add_to_choice(body)
        if self._ended or (more_body and not ends):
            return body
        self._ended = True
        before, after = (body[: -len(DONE)], DONE) if ends else (body, b"")
        return before + self._remaining_event() + after

    def _add_to_choice(self, body: bytes) -> bytes:
        at = body.find(_CHOICES) + len(_CHOICES)
        if at < len(_CHOICES) or not body.startswith(_INDEX, at):
            return body
        index = body[at + len(_INDEX) : body.find(b",", at)]
        feed = self._context.readouts.get(int(index)) if index.isdigit() else None
        if feed is None:
            return body
        members = _members(feed, last=body.find(_FINISHED, at) >= 0)
        return b"".join((body[:at], members, b",", body[at:])) if members else body

    def _add_to_response_event(self, body: bytes) -> bytes:
        at = body.find(_DATA) + len(_DATA)
        feed = self._context.readouts.get(0)
        if at < len(_DATA) or feed is None:
            return body
        members = _members(feed, last=body.startswith(_LAST_EVENTS))
        return b"".join((body[:at], members, b",", body[at:])) if members else body

    def _remaining_event(self) -> bytes:
        """Return an event with what no other event of the stream has carried, or nothing."""
        found = {number: _members(feed, last=True) for number, feed in self._context.readouts.items()}
        choices = [b'{"index":%d,%b}' % (number, members) for number, members in sorted(found.items()) if members]
        if not choices:
            return b""
        if self._context.results_in == "response":
            return b'event: readouts\ndata: {"type":"readouts",%b}\n\n' % found[0]
        return b'data: {"object":"readouts","choices":[%b]}\n\n' % b",".join(choices)

    async def _add_to_json(self, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the response with readouts."""
        status: int = 200 if self._start is None else self._start["status"]
        try:
            document = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            if self._context.results_in == "response":
                carriers = [document]
            else:
                carriers = msgspec.json.decode(document["choices"], type=list[dict[str, msgspec.Raw]])
        except (msgspec.MsgspecError, KeyError):
            problem = "`readouts`: the response of this route has no choices that could carry readouts"
            error = {"message": problem, "type": "InternalServerError", "param": READOUTS_KEY, "code": 500}
            return HTTPStatus.INTERNAL_SERVER_ERROR.value, _encoder.encode({"error": error})
        # By place, not by `index`: the batch route numbers conversations, each with `n` choices.
        for number, carrier in enumerate(carriers):
            feed = self._context.readouts.get(number)
            if feed is not None:
                carrier.update(await _encode_all(feed))
        if carriers[:1] != [document]:
            document["choices"] = msgspec.Raw(_encoder.encode(carriers))
        return status, _encoder.encode(document)


async def _encode_all(feed: ReadoutFeed) -> dict[str, msgspec.Raw]:
    """Return all readouts of a sample that has ended, and its trace."""
    values = feed.take_all()
    fields = {READOUTS_KEY: values, TRACE_KEY: feed.take_trace()}
    given = {name: value for name, value in fields.items() if value is not None}
    if sum(len(each["positions"]) for each in values.values()) < _MANY_POSITIONS:
        return {name: msgspec.Raw(_encoder.encode(value)) for name, value in given.items()}
    return {name: msgspec.Raw(await asyncio.to_thread(_encoder.encode, value)) for name, value in given.items()}


def _members(feed: ReadoutFeed, *, last: bool) -> bytes:
    """Return the new values as members of a JSON object, with the trace if this is the ``last`` event of the choice."""
    values = feed.take_json(last=last)
    members = b'"%b":%b' % (READOUTS_KEY.encode(), values) if values else b""
    trace = feed.take_trace() if last else None
    if trace is None:
        return members
    return b'%b"%b":%b' % (members + b"," if members else b"", TRACE_KEY.encode(), _encoder.encode(trace))
