# SPDX-License-Identifier: Apache-2.0
"""The response field ``steering_applied``: what was applied to a request.

It becomes the first field of a JSON response, or of a stream's first event. Everything else passes unchanged. Its value
is known as soon as the engine has received the request, on every route, so before the first byte of content.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

from vllm_steer.server.http.request_context import RequestContext

FIELD = "steering_applied"
_EVENT = b"data: {"


class AppliedFieldWriter:
    """ASGI ``send`` that inserts the field into one response."""

    def __init__(self, context: RequestContext, send: Send) -> None:
        self._context, self._send = context, send
        self._start: Message | None = None
        self._is_stream = self._done = False

    async def send(self, message: Message) -> None:
        """Send a message of the application."""
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
        elif self._is_stream and not self._done and self._context.applied_json is not None:
            message = self._insert_into_event(message)
        await self._send(message)

    async def _insert_into_json(self, start: Message, message: Message) -> Message:
        body = message.get("body", b"")
        self._start = None
        if body.startswith(b"{"):
            changed = self._insert(body, 1)
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
        return {**message, "body": self._insert(body, at + len(_EVENT))}

    def _insert(self, body: bytes, at: int) -> bytes:
        comma = b"" if body[at:].lstrip().startswith(b"}") else b","
        return b"".join(
            (body[:at], b'"', FIELD.encode(), b'":', self._context.applied_json or b"null", comma, body[at:])
        )
