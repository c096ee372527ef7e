# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware of the interfaces that have an HTTP form.

It runs in front of the steering middleware and translates bodies and responses, so API keys, quotas and checks apply to
the translated requests. A body is read only when the server reads it, which is after authentication.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar

from fastapi import HTTPException
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_steer.errors import SteeringError
from vllm_steer.server.extension import (
    BodyTooLargeError,
    app_path,
    body_checks,
    error_response,
    max_body_bytes,
    require_field_rights,
)


@dataclass(frozen=True)
class Translated:
    """A translated body, and what becomes of its response."""

    document: Mapping[str, Any]
    extend: Callable[[dict[str, Any]], Awaitable[None]] | None = None
    """Adds to the JSON of a complete response with HTTP 200."""
    rewrite: Callable[[bytes], Awaitable[bytes]] | None = None
    """Returns the events of a streamed response that take the place of given ones."""


class TranslatingMiddleware:
    """Base class: refuse paths, and translate the bodies of routes."""

    routes: ClassVar[Collection[str]] = ()
    """Paths whose bodies are translated."""
    refused: ClassVar[Mapping[str, SteeringError]] = {}
    """Errors by the start of a path that the application does not have."""
    fields: ClassVar[Collection[str]] = ()
    """Keys that the translation reads. Bodies without any of them as text pass unread."""
    parents: ClassVar[Collection[str]] = ()
    """Objects of the body that may have the keys, instead of its top level."""
    rights: ClassVar[Mapping[str, str]] = {}
    """Our fields, whose rights are required, by the keys that are translated to them or refused."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.words = [f'"{name}"'.encode() for name in self.fields]

    def require_rights(self, path: str, document: Mapping[str, Any]) -> None:
        """Raise ForbiddenError unless the current key may use the fields of a body. Called before any is read."""
        objects = [document.get(parent) for parent in self.parents] if self.parents else [document]
        given = [each for each in objects if isinstance(each, Mapping)]
        require_field_rights(
            ours for theirs, ours in self.rights.items() if any(each.get(theirs) is not None for each in given)
        )

    def translate(self, scope: Scope, path: str, document: Mapping[str, Any], limit: int) -> Translated:
        """Return a translated body. Runs in a thread, after :meth:`require_rights`, and leaves ``document`` as it is.

        Args:
            scope: The request.
            path: Its path without the application's root path.
            document: The body.
            limit: Most bytes of a body.

        Raises:
            SteeringError: A field is invalid or not served.
        """
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = app_path(scope) if scope["type"] == "http" else ""
        error = next((error for start, error in self.refused.items() if path.startswith(start)), None)
        if error is not None:
            await _refuse_path(self.app, scope, receive, send, error)
        elif scope.get("method") == "POST" and path in self.routes:
            exchange = _Exchange(self, path, scope, receive, send)
            await self.app(scope, exchange.receive, exchange.send)
            await exchange.finish()
        else:
            await self.app(scope, receive, send)


def with_path(scope: Scope, path: str) -> dict[str, Any]:
    """Return a request with another path below the application's root path."""
    whole = scope["path"].removesuffix(app_path(scope)) + path
    return {**scope, "path": whole, "raw_path": whole.encode()}


async def _refuse_path(app: ASGIApp, scope: Scope, receive: Receive, send: Send, error: SteeringError) -> None:
    """Answer a path that ``app`` does not have with ``error``, after its authentication.

    The application answers with HTTP 404, which is replaced; HTTP 401 and 403 stay.
    """
    replaced = False

    async def send_others(message: Message) -> None:
        nonlocal replaced
        if message["type"] == "http.response.start":
            replaced = message["status"] == HTTPStatus.NOT_FOUND
        if not replaced:
            await send(message)

    await app(scope, receive, send_others)
    if replaced:
        await error_response(error)(scope, receive, send)


class _Exchange:
    """Body and response of one request."""

    def __init__(self, peer: TranslatingMiddleware, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._peer, self._path, self._scope, self._receive, self._send = peer, path, scope, receive, send
        self._translated = Translated({})
        self._refusal: SteeringError | None = None
        self._read = self._held = self._is_stream = False
        self._start: Message = {}
        self._body: list[bytes] = []

    async def receive(self) -> Message:
        """Return the translated body in one message."""
        if self._read:
            return await self._receive()
        self._read = True
        chunks: list[bytes] = []
        more = True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            chunks.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(chunks)
        if any(word in body for word in self._peer.words):
            limit = max_body_bytes(getattr(self._scope["app"].state, "args", None))
            try:
                if len(body) > limit:
                    raise BodyTooLargeError("body", f"exceeds {limit >> 20} MiB; raise --steering-max-body-mib")
                body = await body_checks().run(self._translate, body, limit)
            except SteeringError as error:
                self._refusal = error
                raise HTTPException(status_code=400, detail=str(error)) from None
        return {"type": "http.request", "body": body, "more_body": False}

    def _translate(self, body: bytes, limit: int) -> bytes:
        repeated: list[str] = []

        def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found = dict(pairs)
            if len(found) != len(pairs):
                repeated.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            return found

        try:
            document = json.loads(body, object_pairs_hook=read_object)
        except (ValueError, RecursionError):
            return body  # vLLM refuses it
        if not isinstance(document, dict):
            return body
        self._peer.require_rights(self._path, document)
        _refuse_repeated(name for name in repeated if name in (*self._peer.fields, *self._peer.parents))
        self._translated = self._peer.translate(self._scope, self._path, document, limit)
        if self._translated.document == document:
            return body  # with its repeated keys, for the checks that follow
        _refuse_repeated(repeated)
        return json.dumps(self._translated.document).encode()

    async def send(self, message: Message) -> None:
        """Pass a message on, or hold the response that is replaced or extended after its end.

        Events of a stream pass at once.
        """
        if message["type"] == "http.response.start":
            self._start = message
            succeeded = message["status"] == HTTPStatus.OK
            content_type = MutableHeaders(scope=message).get("content-type", "")
            self._is_stream = succeeded and content_type.startswith("text/event-stream")
            extends = succeeded and not self._is_stream and self._translated.extend is not None
            self._held = self._refusal is not None or extends
        elif self._is_stream and self._translated.rewrite is not None and message["type"] == "http.response.body":
            events = message.get("body", b"")
            if (rewritten := await self._translated.rewrite(events)) is not events:
                message = {**message, "body": rewritten}
        if not self._held:
            await self._send(message)
        elif message["type"] == "http.response.body":
            self._body.append(message.get("body", b""))

    async def finish(self) -> None:
        """Send the refusal, or the held response with what is added."""
        if self._refusal is not None:
            await error_response(self._refusal)(self._scope, self._receive, self._send)
        elif self._held and self._translated.extend is not None:
            document = json.loads(b"".join(self._body))
            await self._translated.extend(document)
            response = JSONResponse(document)
            headers = MutableHeaders(raw=[*self._start["headers"]])
            headers["content-length"] = str(len(response.body))
            await self._send({**self._start, "headers": headers.raw})
            await self._send({"type": "http.response.body", "body": response.body})


def _refuse_repeated(names: Iterable[str]) -> None:
    """Raise SteeringError for a key that an object of the body has twice: the translated body has the last one only."""
    for name in names:
        raise SteeringError(name, "is in an object of the body twice, and one would be ignored; give it once")
