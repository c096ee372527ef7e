# SPDX-License-Identifier: Apache-2.0
"""Refusal of steering and capture fields in WebSocket messages (``/v1/realtime``), also of misspelt ones.

vLLM ignores unknown fields of an event, and a realtime session cannot be steered. An event with such a field is
answered with an error event in vLLM's form, and the connection is closed.
"""

from __future__ import annotations

import json
from http import HTTPStatus

from starlette.types import Message, Receive, Scope, Send

from vllm_steer.metrics.requests import count_refusal
from vllm_steer.server.http.field_scanner import EVENT_PARENTS, event_field
from vllm_steer.server.http.misspelt_fields import find_misspelt, is_refused
from vllm_steer.server.routes.base import app_path

REALTIME_ROUTE = "/v1/realtime"
POLICY_VIOLATION = 1008
"""WebSocket close code of a refused connection."""


class WebSocketGuard:
    """ASGI ``receive`` and ``send`` of one connection, with a check of each received message."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._app = scope["app"]
        self._path = app_path(scope)
        self._receive, self._send = receive, send
        self._closed = False

    async def receive(self) -> Message:
        """Return the next message, or a disconnect after a refused one."""
        message = await self._receive()
        if message["type"] != "websocket.receive":
            return message
        text = message.get("text")
        event = text.encode("utf-8", "surrogatepass") if text is not None else message.get("bytes") or b""
        refusal = await self._refusal(event)
        if refusal is None:
            return message
        name, problem = refusal
        count_refusal(HTTPStatus.BAD_REQUEST.value, name)
        error = {"type": "error", "error": f"{name}: {problem}", "code": "invalid_event"}
        await self._send({"type": "websocket.send", "text": json.dumps(error)})
        await self._send({"type": "websocket.close", "code": POLICY_VIOLATION})
        self._closed = True
        return {"type": "websocket.disconnect", "code": POLICY_VIOLATION}

    async def _refusal(self, event: bytes) -> tuple[str, str] | None:
        """Return the name and the problem of the first field of an event that would be ignored, or None."""
        if name := event_field(event):
            return name, f"{self._path[:80]} does not support this field; remove it"
        error = find_misspelt(event, EVENT_PARENTS) if self._path == REALTIME_ROUTE else None
        if error is None or not await is_refused(error, self._app):
            return None
        return error.field, f"{error.problem}; {self._path[:80]} cannot steer: remove it"

    async def send(self, message: Message) -> None:
        """Send a message of the application, unless the connection was closed by a refusal."""
        if not self._closed:
            await self._send(message)
