# SPDX-License-Identifier: Apache-2.0
"""Check of one HTTP request's body, and of the response to it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterable
from functools import partial
from http import HTTPStatus
from typing import NoReturn

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import NOT_ENABLED, ensure_engine_context, known_engine_context
from vllm_steer.limits import KEY_STORE_MIB
from vllm_steer.metrics.requests import NO_CAPACITY, count_refusal
from vllm_steer.params import CAPTURE_FIELD
from vllm_steer.request.readout import READOUTS_FIELD
from vllm_steer.server.access_errors import KeyLimitError
from vllm_steer.server.auth.current_key import current_owner, require_field_rights
from vllm_steer.server.http.apply_fields import compile_own
from vllm_steer.server.http.body_checks import LARGE_BODY, body_checks
from vllm_steer.server.http.error_response import BodyTooLargeError, error_response, error_status
from vllm_steer.server.http.field_scanner import OVERLAP, find_fields, form_field, form_names, is_utf8, may_hold_fields
from vllm_steer.server.http.misspelt_fields import WRAPPERS, FormNames, find_misspelt, is_refused
from vllm_steer.server.http.packed_bodies import pack_body
from vllm_steer.server.http.request_context import RequestContext
from vllm_steer.server.http.response_writer import ResponseWriter, content_encoding
from vllm_steer.server.http.running_requests import BATCH_ROUTE, RESPONSES_ROUTE
from vllm_steer.server.quota.tracker import Reservation
from vllm_steer.server.routes.base import app_path
from vllm_steer.server.routes.captures import capture_store_of
from vllm_steer.server.routes.live import running_requests_of
from vllm_steer.server.settings import max_body_bytes

STEERABLE_ROUTES: tuple[str, ...] = (
    "/v1/completions",
    "/v1/chat/completions",
    BATCH_ROUTE,
    RESPONSES_ROUTE,
    "/invocations",
)
"""Routes that create sampling parameters through methods that this package wraps. Other routes refuse the fields."""
UNSTEERABLE_ROUTES = frozenset(
    {"/v1/messages", "/cohere/v2/chat", "/inference/v1/generate", "/generative_scoring", "/v1/systemone"}
)
"""Other routes with JSON bodies that run the model. They refuse misspelt fields as well; for :data:`STEERABLE_ROUTES`,
``apply_fields.py`` does."""

FORM_ROUTES = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""Routes with multipart forms that run the model. They refuse misspelt fields as well."""

COMPOSING_ROUTES: tuple[str, ...] = (*STEERABLE_ROUTES, *FORM_ROUTES)
"""Routes whose handlers use the registry: those above, and the others with beam search."""

RETRY_AFTER = 10
"""Seconds to wait after an admission timeout, for the ``Retry-After`` header."""


class RequestGuard:
    """ASGI ``receive`` and ``send`` of one request: the first checks the body, the second can send a refusal."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, reservation: Reservation) -> None:
        self.context = RequestContext(
            reservation=reservation, owner=current_owner(), store_bytes=reservation.store_bytes
        )
        self._app = scope["app"]
        self.context.capture_store = partial(capture_store_of, self._app)
        self.context.directory = running_requests_of(self._app)
        self._path = self.context.route = app_path(scope)
        self._scope, self._receive = scope, receive
        self._send = send
        self._send_body: Send | None = None
        """Sends the body of a response that has started; None if it may still be replaced."""
        headers = Headers(scope=scope)
        if self._path == RESPONSES_ROUTE:
            self.context.header_id = headers.get("x-request-id")
        self._is_form = headers.get("content-type", "").lower().startswith("multipart/")
        self._form_names = FormNames()
        self._tail = b""
        self._all_read = False
        self._started = False
        self._refused = False
        self._refusal: SteeringError | None = None

    async def refresh_registry(self) -> None:
        """Load the current modules and global steering in a thread, so that the event loop does not wait for them."""
        engine = getattr(self._app.state, "engine_client", None)
        await self.context.use_engine(None if engine is None else known_engine_context(engine))

    @property
    def refusal_pending(self) -> bool:
        """Whether a refusal must still be sent."""
        return self._refusal is not None and not self._started

    async def receive(self) -> Message:
        """Return the body: JSON in one message, forms message by message.

        Raises:
            HTTPException: The request is refused. FastAPI handles no other exception of a middleware.
        """
        if self._all_read:
            return await self._receive()
        return await (self._receive_form() if self._is_form else self._receive_json())

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message of the application, or the refusal in place of the response."""
        if self._send_body is not None:
            return self._send_body(message)  # hot path: each token of a stream
        return self._send_edge(message)

    async def _send_edge(self, message: Message) -> None:
        """Send the start of a response, or the refusal."""
        if self._refused:
            return
        if message["type"] == "http.response.start":
            self._check_response(message)
            if self.refusal_pending:
                await self.refuse(message["headers"])
                return
            self._started = True
            self._send_body = self._send
            if not self.context.changes_nothing:
                store = partial(capture_store_of, self._app)
                self._send_body = ResponseWriter(self.context, store, self._receive, self._send).send
            await self._send_body(message)
            return
        await self._send(message)

    async def refuse(self, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Send the refusal with those of ``headers``, the replaced response's, that do not describe its content."""
        if self._refusal is None:
            return
        response = error_response(self._refusal)
        response.raw_headers += [header for header in headers if not header[0].lower().startswith(b"content-")]
        self._refused = self._started = True
        await response(self._scope, self._receive, self._send)

    def _check_response(self, start: Message) -> None:
        context, failed = self.context, start["status"] >= 400
        if failed:
            self._refusal = self._refusal or context.refusal
        elif context.fields and not context.fields_applied:
            self._refusal = self._refusal or self._unsupported(context.fields[0])
        if not failed and (context.consumers or context.dynamic) and (encoding := content_encoding(start)):
            problem = f"results cannot be added: another middleware encoded the response as {encoding}"
            field = CAPTURE_FIELD if context.consumers else READOUTS_FIELD
            self._refusal = self._refusal or SteeringError(field, problem)
        may_have_waited = context.fields_applied or context.has_program
        if start["status"] == HTTPStatus.SERVICE_UNAVAILABLE and may_have_waited and self._refusal is None:
            count_refusal(start["status"], NO_CAPACITY)
            MutableHeaders(scope=start).setdefault("retry-after", str(RETRY_AFTER))

    async def _receive_form(self) -> Message:
        message = await self._receive()
        self._all_read = not message.get("more_body", False)
        window = self._tail + message.get("body", b"")
        self._tail = window[-OVERLAP:]
        names = form_names(window)
        if name := form_field(names):
            self._raise(self._unsupported(name))
        if self._path in FORM_ROUTES:
            await self._refuse_misspelt(self._form_names.find_misspelt(names))
        return message

    async def _receive_json(self) -> Message:
        limit = max_body_bytes(getattr(self._app.state, "args", None))
        chunks: list[bytes] = []
        size, suspect, more = 0, False, True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                self._all_read = True
                return message
            chunk, more = message.get("body", b""), message.get("more_body", False)
            window = self._tail + chunk if self._tail else chunk
            suspect = suspect or may_hold_fields(window)
            self._tail = window[-OVERLAP:]
            size += len(chunk)
            chunks.append(chunk)
            if suspect and size > limit:
                chunks.clear()  # Keep reading: a client that is still sending does not see the response.
        self._all_read = True
        body = b"".join(chunks)
        suspect = suspect or not is_utf8(body)
        if suspect and size > limit:
            problem = f"exceeds {limit >> 20} MiB with steering or capture fields; raise --steering-max-body-mib"
            self._raise(BodyTooLargeError("body", problem))
        if suspect:
            body = await self._check_fields(body)
        if self._path in UNSTEERABLE_ROUTES:
            await self._refuse_misspelt(find_misspelt(body, WRAPPERS))
        return {"type": "http.request", "body": body, "more_body": False}

    async def _refuse_misspelt(self, error: SteeringError | None) -> None:
        if error is not None and await is_refused(error, self._app):
            problem = f"{error.problem}; {self._path} cannot steer: use one of {', '.join(STEERABLE_ROUTES)}"
            self._raise(SteeringError(error.field, problem))

    async def _check_fields(self, body: bytes) -> bytes:
        """Check the fields of a body and return the body, with packed vectors."""
        try:
            found = find_fields(body) if len(body) < LARGE_BODY else await body_checks().run(find_fields, body)
            require_field_rights(found.fields)
        except SteeringError as error:
            self._raise(error)
        if found.problem is not None:
            self._raise(found.problem)
        if not found.fields:
            return body
        name = found.fields[0]
        self.context.fields = found.fields
        if self._path not in STEERABLE_ROUTES:
            self._raise(self._unsupported(name))
        engine = getattr(self._app.state, "engine_client", None)
        if engine is None:
            self._raise(SteeringError(name, "not supported: this server has no engine"))
        self.context.engine = await ensure_engine_context(engine)
        if self.context.engine is None:
            self._raise(SteeringError(name, NOT_ENABLED))
        if CAPTURE_FIELD in found.fields:
            await self._check_stored_captures()
        if len(body) < LARGE_BODY:
            return body if found.document is None else pack_body(body, found.document)
        try:
            self.context.own = await body_checks().run(compile_own, found.values, self.context)
            return body if found.document is None else await body_checks().run(pack_body, body, found.document)
        except SteeringError as error:
            self._raise(error)

    async def _check_stored_captures(self) -> None:
        """Refuse the capture if the owner's stored captures have used up its share of the store."""
        limit = self.context.store_bytes
        if limit is None:
            return
        used, expires = await asyncio.to_thread(capture_store_of(self._app).usage, self.context.owner)
        if used and used >= limit:
            problem = (
                f"stored captures of this key use {used} of {limit} bytes ({KEY_STORE_MIB.flag}); delete some first"
            )
            self._raise(KeyLimitError(CAPTURE_FIELD, problem, math.ceil(expires) or 1))

    def _raise(self, error: SteeringError) -> NoReturn:
        self._refusal = error
        raise HTTPException(status_code=error_status(error)[0].value, detail=str(error))

    def _unsupported(self, name: str) -> SteeringError:
        return SteeringError(
            name, f"{self._path[:80]} does not support this field; use one of {', '.join(STEERABLE_ROUTES)}"
        )
