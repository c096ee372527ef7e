# SPDX-License-Identifier: Apache-2.0
"""WebSockets (``/v1/realtime``): what their messages ask of steering or capture is refused.

vLLM goes on without what it does not know in an event. No session can be steered by fields of its own, so one that has
any gets an error event in vLLM's form, and ends: whoever asked is not to take what comes next for steered.
"""

from __future__ import annotations

import json
from http import HTTPStatus

from starlette.types import Message, Receive, Scope, Send

from vllm_steer.metrics.requests import count_refusal
from vllm_steer.server.http.field_scanner import event_field
from vllm_steer.server.routes.base import path_of

POLICY_VIOLATION = 1008
"""The code with which the connection is closed."""


class SteeringWebSocket:
    """One connection; ``receive`` looks into its messages."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._path = path_of(scope)
        self._receive, self._send = receive, send
        self._ended = False

    async def receive(self) -> Message:
        """The next message, or the end of the connection in the place of one that is refused."""
        message = await self._receive()
        if message["type"] != "websocket.receive":
            return message
        text = message.get("text")
        name = event_field(text.encode("utf-8", "surrogatepass") if text is not None else message.get("bytes") or b"")
        if name is None:
            return message
        count_refusal(HTTPStatus.BAD_REQUEST.value, name)
        problem = f"{name}: {self._path[:80]} does not carry it to the engine, so it would be ignored; leave it out"
        error = {"type": "error", "error": problem, "code": "invalid_event"}
        await self._send({"type": "websocket.send", "text": json.dumps(error)})
        await self._send({"type": "websocket.close", "code": POLICY_VIOLATION})
        self._ended = True
        return {"type": "websocket.disconnect", "code": POLICY_VIOLATION}

    async def send(self, message: Message) -> None:
        """As the server's own, which takes nothing after the end."""
        if not self._ended:
            await self._send(message)
