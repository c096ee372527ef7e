# SPDX-License-Identifier: Apache-2.0
"""The ASGI middleware of every server: steering and capture are applied or refused, and never ignored.

First of all it sees who asks, and what that one has going (``entrance.py``, ``books.py``). The rest works where a route
reads its body, hence behind vLLM's authentication too, and costs a request without steering fields a search for their
names. What is wrong inside the fields is found when vLLM makes sampling parameters (``protocol.py``); what is wrong
around them is refused here, with an answer of the same form.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from http import HTTPStatus
from typing import NoReturn

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import NOT_ENABLED, ensure_engine_context, known_engine_context
from vllm_steer.metrics.requests import NO_ROOM, count_refusal
from vllm_steer.params import CAPTURE_FIELD
from vllm_steer.server.access_errors import KeyLimitError
from vllm_steer.server.auth.authenticator import authenticate
from vllm_steer.server.auth.current_key import current_owner, require_field_rights, use_key
from vllm_steer.server.flags import max_body_bytes
from vllm_steer.server.http.applied_field import AppliedFieldWriter
from vllm_steer.server.http.capture_results import CaptureResultWriter
from vllm_steer.server.http.field_scanner import OVERLAP, find_fields, form_field, is_utf8, may_hold_fields
from vllm_steer.server.http.request_context import RequestContext, current
from vllm_steer.server.http.websocket import SteeringWebSocket
from vllm_steer.server.lifespan import live
from vllm_steer.server.quota.limits import KEY_STORE
from vllm_steer.server.quota.tracker import Reservation, quota_tracker_of
from vllm_steer.server.routes.base import OWN_PREFIX, BodyTooLargeError, path_of, refusal, status_of
from vllm_steer.server.routes.captures import store_of

# Routes whose requests become sampling parameters through the methods that we wrap. All others refuse.
CARRYING_ROUTES: tuple[str, ...] = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/invocations",
)

RETRY_AFTER = 10
"""Seconds after which a client may try again whose request waited too long for its places in the engine."""


class SteeringMiddleware:
    """Pure ASGI, so that streams pass untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await live(self.app, scope, receive, send)
            return
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        try:
            visit = await authenticate(scope)
            hold = quota_tracker_of(scope["app"]).reserve(visit.quota_key)
        except SteeringError as error:
            await refusal(error)(scope, receive, send)
            return
        try:
            with use_key(visit.key):
                await self._serve(visit.scope, receive, send, hold)
        finally:
            hold.release()

    async def _serve(self, scope: Scope, receive: Receive, send: Send, hold: Reservation) -> None:
        if scope["type"] == "websocket":
            socket = SteeringWebSocket(scope, receive, send)
            await self.app(scope, socket.receive, socket.send)
            return
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        path = path_of(scope)
        if path.startswith(OWN_PREFIX):  # our own routes look at their bodies themselves
            await self.app(scope, receive, send)
            return
        gate = _RequestGuard(scope, receive, send, hold)
        try:
            if path in CARRYING_ROUTES:
                await gate.prepare()
        except SteeringError as error:  # of a registry that cannot be read
            await refusal(error)(scope, receive, send)
            return
        token = current.set(gate.exchange)
        try:
            await self.app(scope, gate.receive, gate.send)
        except HTTPException:  # read outside a route, by another middleware
            if not gate.must_refuse:
                raise
            await gate.refuse()
        finally:
            current.reset(token)
            gate.exchange.end()


class _RequestGuard:
    """One request: ``receive`` looks into its body, ``send`` puts a refusal in the place of an answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, hold: Reservation) -> None:
        self.exchange = RequestContext(hold=hold, owner=current_owner(), store_bytes=hold.store_bytes)
        self._scope, self._receive = scope, receive
        self._send = AppliedFieldWriter(self.exchange, send).send
        self._is_form = Headers(scope=scope).get("content-type", "").lower().startswith("multipart/")
        self._seen = b""
        self._all_read = False
        self._started = False
        self._refused = False
        self._delivery: CaptureResultWriter | None = None
        self._refusal: SteeringError | None = None

    async def prepare(self) -> None:
        """See to it that global steering and modules are those of now, without reading files in the event loop."""
        engine = getattr(self._scope["app"].state, "engine_client", None)
        self.exchange.served = None if engine is None else known_engine_context(engine)
        if self.exchange.served is not None and self.exchange.served.registry.is_stale():
            await asyncio.to_thread(self.exchange.served.registry.snapshot)

    @property
    def must_refuse(self) -> bool:
        """Whether there is a refusal that is still to be sent."""
        return self._refusal is not None and not self._started

    async def receive(self) -> Message:
        """The body, JSON in one piece and forms as they come.

        Raises ``HTTPException`` for what is refused: FastAPI passes on no other error of a middleware.
        """
        if self._all_read:
            return await self._receive()
        return await (self._receive_form() if self._is_form else self._receive_json())

    async def send(self, message: Message) -> None:
        if self._refused:
            return
        if message["type"] == "http.response.start":
            ignored = self.exchange.fields and not self.exchange.applied and message["status"] < 400
            if ignored and self._refusal is None:
                self._refusal = self._not_carried(self.exchange.fields[0])
            if message["status"] >= 400 and self._refusal is None:
                self._refusal = self.exchange.refusal
            if self.exchange.consumers and message["status"] < 400:
                self._prepare_delivery(message)
            if self.must_refuse:
                await self.refuse(message["headers"])
                return
            self._started = True
            waited = self.exchange.applied or self.exchange.needs_room
            if message["status"] == HTTPStatus.SERVICE_UNAVAILABLE and waited:
                count_refusal(message["status"], NO_ROOM)
                MutableHeaders(scope=message).setdefault("retry-after", str(RETRY_AFTER))
        await (self._send if self._delivery is None else self._delivery.send)(message)

    def _prepare_delivery(self, start: Message) -> None:
        encoding = Headers(scope=start).get("content-encoding", "identity")
        if encoding == "identity":
            self._delivery = CaptureResultWriter(self.exchange, store_of(self._scope["app"]), self._receive, self._send)
        elif self._refusal is None:
            problem = f"nothing can be put into answers that another middleware of this server has encoded ({encoding})"
            self._refusal = SteeringError(CAPTURE_FIELD, problem)

    async def refuse(self, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Send the refusal, with those of the replaced answer's headers that are not about its content."""
        if self._refusal is None:
            return
        response = refusal(self._refusal)
        response.raw_headers += [header for header in headers if not header[0].lower().startswith(b"content-")]
        self._refused = self._started = True
        await response(self._scope, self._receive, self._send)

    async def _receive_form(self) -> Message:
        message = await self._receive()
        self._all_read = not message.get("more_body", False)
        window = self._seen + message.get("body", b"")
        self._seen = window[-OVERLAP:]
        if name := form_field(window):
            self._raise(self._not_carried(name))
        return message

    async def _receive_json(self) -> Message:
        limit = max_body_bytes(getattr(self._scope["app"].state, "args", None))
        pieces: list[bytes] = []
        size, suspect, more = 0, False, True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                self._all_read = True
                return message
            piece, more = message.get("body", b""), message.get("more_body", False)
            window = self._seen + piece if self._seen else piece
            suspect = suspect or may_hold_fields(window)
            self._seen = window[-OVERLAP:]
            size += len(piece)
            pieces.append(piece)
            if suspect and size > limit:
                pieces.clear()  # and read on: a client that is still writing would not see the answer
        self._all_read = True
        body = b"".join(pieces)
        suspect = suspect or not is_utf8(body)
        if suspect and size > limit:
            problem = f"has over {limit >> 20} MiB, the limit with steering or capture fields (--steering-max-body-mib)"
            self._raise(BodyTooLargeError("body", problem))
        if suspect:
            await self._inspect(body)
        return {"type": "http.request", "body": body, "more_body": False}

    async def _inspect(self, body: bytes) -> None:
        found = find_fields(body)
        if found.problem is not None:
            self._raise(found.problem)
        if not found.fields:
            return
        name = found.fields[0]
        try:
            require_field_rights(found.fields)
        except SteeringError as error:
            self._raise(error)
        self.exchange.fields = found.fields
        if self._path not in CARRYING_ROUTES:
            self._raise(self._not_carried(name))
        engine = getattr(self._scope["app"].state, "engine_client", None)
        if engine is None:
            self._raise(SteeringError(name, "there is no engine behind this server, so it would be ignored"))
        self.exchange.served = await ensure_engine_context(engine)
        if self.exchange.served is None:
            self._raise(SteeringError(name, NOT_ENABLED))
        if CAPTURE_FIELD in found.fields:
            await self._check_store()

    async def _check_store(self) -> None:
        """Rows that a key has not fetched take the room of those that it asks for next."""
        most = self.exchange.store_bytes
        if most is None:
            return
        used, expires = await asyncio.to_thread(store_of(self._scope["app"]).used_by, self.exchange.owner)
        if used and used >= most:
            problem = (
                f"{used} bytes of this key's captures wait to be fetched, of {most} ({KEY_STORE.flag}); delete some"
            )
            self._raise(KeyLimitError(CAPTURE_FIELD, problem, math.ceil(expires) or 1))

    def _raise(self, error: SteeringError) -> NoReturn:
        self._refusal = error
        raise HTTPException(status_code=status_of(error)[0].value, detail=str(error))

    @property
    def _path(self) -> str:
        return path_of(self._scope)

    def _not_carried(self, name: str) -> SteeringError:
        routes = ", ".join(CARRYING_ROUTES)
        problem = f"{self._path[:80]} does not carry it to the engine, so it would be ignored; use one of {routes}"
        return SteeringError(name, problem)
