# SPDX-License-Identifier: Apache-2.0
"""Saying in an answer what was applied to its request: ``steering_applied``.

A JSON answer gets it as its first field, a stream in its first event; the rest passes byte by byte as it is. What was
applied is known when the engine has been given the request, so before the first byte of content, whatever the route.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

from vllm_steer.server.http.request_context import RequestContext

NAME = "steering_applied"
_EVENT = b"data: {"


class AppliedFieldWriter:
    """One answer on its way out; :meth:`send` takes the place of the server's own."""

    def __init__(self, exchange: RequestContext, send: Send) -> None:
        self._exchange, self._send = exchange, send
        self._start: Message | None = None
        self._is_stream = self._done = False

    async def send(self, message: Message) -> None:
        """Take one ASGI message of the application."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            kind = headers.get("content-type", "")
            plain = headers.get("content-encoding", "identity") == "identity" and message["status"] < 400
            self._is_stream = kind.startswith("text/event-stream") and plain
            if self._exchange.steering is not None and kind.startswith("application/json") and plain:
                self._start = message  # its length depends on what comes
                return
        elif self._start is not None:
            if not message.get("body") and message.get("more_body", False):
                return  # nothing of the content yet
            message = await self._stamped_answer(self._start, message)
        elif self._is_stream and not self._done and self._exchange.steering is not None:
            message = self._stamped_event(message)
        await self._send(message)

    async def _stamped_answer(self, start: Message, message: Message) -> Message:
        body = message.get("body", b"")
        self._start = None
        if body.startswith(b"{"):
            stamped = self._with_field(body, 1)
            start = {**start, "headers": list(start["headers"])}
            headers = MutableHeaders(scope=start)
            if "content-length" in headers:
                headers["content-length"] = str(int(headers["content-length"]) + len(stamped) - len(body))
            message = {**message, "body": stamped}
        await self._send(start)
        return message

    def _stamped_event(self, message: Message) -> Message:
        body = message.get("body", b"")
        at = 0 if body.startswith(_EVENT) else body.find(b"\n" + _EVENT) + 1
        if not body.startswith(_EVENT, at):
            return message
        self._done = True
        return {**message, "body": self._with_field(body, at + len(_EVENT))}

    def _with_field(self, body: bytes, at: int) -> bytes:
        comma = b"" if body[at:].lstrip().startswith(b"}") else b","
        return b"".join((body[:at], b'"', NAME.encode(), b'":', self._exchange.steering or b"null", comma, body[at:]))
