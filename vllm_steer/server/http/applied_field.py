# SPDX-License-Identifier: Apache-2.0
"""The response field ``steering_applied``: what was applied to a request.

It becomes the first field of a JSON response, or of a stream's first event. Everything else passes unchanged. Its value
is known as soon as the engine has received the request, on every route, so before the first byte of content. Only edits
that no token reached are known at the end: a stream that has any gets one more event with the complete value.
"""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

from vllm_steer.server.http.request_context import RequestContext

FIELD = "steering_applied"
DONE = b"data: [DONE]\n\n"
_NAME = FIELD.encode()
_EVENT = b"data: {"


class AppliedFieldWriter:
    """ASGI ``send`` that inserts the field into one response."""

    def __init__(self, context: RequestContext, send: Send) -> None:
        self._context, self._send = context, send
        self._start: Message | None = None
        self._is_stream = self._done = self._ended = False

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message of the application."""
        if self._done and message.get("more_body", False) and not message.get("body", b"").endswith(DONE):
            return self._send(message)  # hot path: each token of a stream after the first
        return self._send_edge(message)

    async def _send_edge(self, message: Message) -> None:
        """Send the start of a response, the body of a JSON response, or the first or last events of a stream."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            kind = headers.get("content-type", "")
            editable = headers.get("content-encoding", "identity") == "identity" and message["status"] < 400
            self._is_stream = kind.startswith("text/event-stream") and editable
            if self._context.applied_json is not None and kind.startswith("application/json") and editable:
                self._start = message  # held back: its content-length changes
                return
        elif self._start is not None:
            if not message.get("body") and message.get("more_body", False):
                return
            message = await self._insert_into_json(self._start, message)
        elif self._is_stream and self._context.applied_json is not None:
            message = self._add_last_event(message if self._done else self._insert_into_event(message))
        await self._send(message)

    async def _insert_into_json(self, start: Message, message: Message) -> Message:
        body = message.get("body", b"")
        self._start = None
        if body.startswith(b"{"):
            changed = self._insert(body, 1, self._context.final_applied_json())
            start = {**start, "headers": list(start["headers"])}
            headers = MutableHeaders(scope=start)
            if "content-length" in headers:
                headers["content-length"] = str(int(headers["content-length"]) + len(changed) - len(body))
            message = {**message, "body": changed}
        await self._send(start)
        return message

    def _insert_into_event(self, message: Message) -> Message:
        body = message.get("body", b"")
        at = 0 if body.startswith(_EVENT) else body.find(b"\n" + _EVENT) + 1
        if not body.startswith(_EVENT, at):
            return message
        self._done = True
        return {**message, "body": self._insert(body, at + len(_EVENT), self._context.applied_json)}

    def _add_last_event(self, message: Message) -> Message:
        """Add the event with unreached edits to the message that ends the stream."""
        body = message.get("body", b"")
        ends = body.endswith(DONE)
        if self._ended or not (ends or not message.get("more_body", False)):
            return message
        self._ended = True
        # Plain requests under global steering keep the events of the route, which may not be OpenAI's.
        if not self._context.fields_applied or not any(self._context.unreached.values()):
            return message
        before, after = (body[: -len(DONE)], DONE) if ends else (body, b"")
        value = self._context.final_applied_json() or b"null"
        if self._context.results_in == "response":
            event = b'event: %b\ndata: {"type":"%b","%b":%b}\n\n' % (_NAME, _NAME, _NAME, value)
        else:
            event = b'data: {"object":"%b","choices":[],"%b":%b}\n\n' % (_NAME, _NAME, value)
        return {**message, "body": before + event + after}

    def _insert(self, body: bytes, at: int, value: bytes | None) -> bytes:
        comma = b"" if body[at:].lstrip().startswith(b"}") else b","
        return b"".join((body[:at], b'"', _NAME, b'":', value or b"null", comma, body[at:]))
