# SPDX-License-Identifier: Apache-2.0
"""Refusal of steering and capture fields in WebSocket messages (``/v1/realtime``).

vLLM ignores unknown fields of an event, and a realtime session cannot be steered. An event with such a field is
answered with an error event in vLLM's form, and the connection is closed.
"""

from __future__ import annotations

import json
from http import HTTPStatus

from starlette.types import Message, Receive, Scope, Send

from vllm_steer.metrics.requests import count_refusal
from vllm_steer.server.http.field_scanner import event_field
from vllm_steer.server.routes.base import app_path

POLICY_VIOLATION = 1008
"""WebSocket close code of a refused connection."""


class WebSocketGuard:
    """ASGI ``receive`` and ``send`` of one connection, with a check of each received message."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._path = app_path(scope)
        self._receive, self._send = receive, send
        self._closed = False

    async def receive(self) -> Message:
        """Return the next message, or a disconnect after a refused one."""
        message = await self._receive()
        if message["type"] != "websocket.receive":
            return message
        text = message.get("text")
        name = event_field(text.encode("utf-8", "surrogatepass") if text is not None else message.get("bytes") or b"")
        if name is None:
            return message
        count_refusal(HTTPStatus.BAD_REQUEST.value, name)
        problem = f"{name}: {self._path[:80]} does not support this field; remove it"
        error = {"type": "error", "error": problem, "code": "invalid_event"}
        await self._send({"type": "websocket.send", "text": json.dumps(error)})
        await self._send({"type": "websocket.close", "code": POLICY_VIOLATION})
        self._closed = True
        return {"type": "websocket.disconnect", "code": POLICY_VIOLATION}

    async def send(self, message: Message) -> None:
        """Send a message of the application, unless the connection was closed by a refusal."""
        if not self._closed:
            await self._send(message)
