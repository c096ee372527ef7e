# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware that serves the request keys of vllm-lens over HTTP.

It stands in front of the steering middleware and translates bodies and responses, so API keys, quotas and checks are
those of the translated requests. A body is read only when the server reads it, which is after authentication.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias
from urllib.parse import quote

import torch
from fastapi import HTTPException
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_steer.client.encoding import to_json
from vllm_steer.client.responses import CaptureAnswer, parse_completion, read_capture_file
from vllm_steer.errors import SteeringError
from vllm_steer.peers.bodies import ParsedBody, refuse_path
from vllm_steer.peers.vllm_lens.client import HEADER
from vllm_steer.peers.vllm_lens.keys import (
    CAPTURE_KEY,
    KEYS,
    LORA_FIELD,
    PARENTS,
    REFUSED_KEYS,
    STEERING_KEY,
    LensRequest,
    read_adapter,
    read_keys,
)
from vllm_steer.peers.vllm_lens.tensors import describe, serialize_tensor, stack_layers, tensor_bytes, zstd
from vllm_steer.server.http.body_checks import body_checks
from vllm_steer.server.http.error_response import BodyTooLargeError, error_response
from vllm_steer.server.routes.base import COUNTED_KEY, app_path
from vllm_steer.server.settings import max_body_bytes

ROUTES = ("/v1/completions", "/v1/chat/completions")
HANDLE_PREFIX, HOOKS_PREFIX = "/v1/activations/", "/v1/hooks"
RESULTS_EVENT = b'data: {"object":"capture_results"'
"""Start of the event of a stream that has the captured rows."""
RIGHTS = {CAPTURE_KEY: "capture", STEERING_KEY: "steering", **dict.fromkeys(REFUSED_KEYS, "steering")}
"""Our fields by the request keys that become them, or that are refused."""
Fetch: TypeAlias = Callable[[str], Awaitable[torch.Tensor]]
_WORDS = tuple(f'"{key}"'.encode() for key in (*KEYS, LORA_FIELD))


class VllmLensMiddleware:
    """Translate bodies with the request keys, and add ``activations`` to their responses.

    Raises:
        SteeringError: ``zstandard`` is not installed.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        zstd()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = app_path(scope) if scope["type"] == "http" else ""
        if path.startswith(HOOKS_PREFIX):
            error = SteeringError("apply_hooks", REFUSED_KEYS["apply_hooks"])
            await refuse_path(self.app, scope, receive, send, error)
        elif path.startswith(HANDLE_PREFIX) and scope["method"] == "GET":
            response = await self._activations(scope, path.removeprefix(HANDLE_PREFIX))
            await response(scope, receive, send)
        elif path in ROUTES and scope["method"] == "POST":
            exchange = _Exchange(scope, receive, send, lambda capture_id: self._fetch(scope, capture_id))
            await self.app(scope, exchange.receive, exchange.send)
            await exchange.finish()
        else:
            await self.app(scope, receive, send)

    async def _activations(self, scope: Scope, handle: str) -> Response:
        """Return the tensor behind a handle, or the server's refusal."""
        start, data = await self._get(scope, f"/v1/captures/{quote(handle, safe='')}")
        if start["status"] != 200:
            kept = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
            response = Response(data, status_code=start["status"])
            response.raw_headers += kept
            return response
        tensor = await asyncio.to_thread(_tensor_of_file, data)
        raw = await asyncio.to_thread(tensor_bytes, tensor)
        headers = {
            **{f"{HEADER}{name.replace('_', '-')}": _header(value) for name, value in describe(tensor).items()},
            f"{HEADER}bytes": str(len(raw)),
            "cache-control": "no-store",
        }
        compressed = await asyncio.to_thread(zstd().compress, raw)
        return Response(compressed, media_type="application/octet-stream", headers=headers)

    async def _fetch(self, scope: Scope, capture_id: str) -> torch.Tensor:
        """Return the rows of a stored capture.

        Raises:
            SteeringError: It is not there any more.
        """
        counted = {**scope, COUNTED_KEY: True}  # the key may be at its limit
        start, data = await self._get(counted, f"/v1/captures/{quote(capture_id, safe='')}")
        if start["status"] != 200:
            raise SteeringError("activations", f"the stored rows cannot be read (HTTP {start['status']})")
        return await asyncio.to_thread(_tensor_of_file, data)

    async def _get(self, scope: Scope, path: str) -> tuple[Message, bytes]:
        """Return start message and body of the application's answer to GET ``path``, with the caller's credentials."""
        root = scope["path"][: len(scope["path"]) - len(app_path(scope))]
        described = (b"content-type", b"content-length", b"transfer-encoding")
        inner = {
            **scope,
            "method": "GET",
            "path": root + path,
            "raw_path": (root + path).encode(),
            "query_string": b"",
            "headers": [header for header in scope["headers"] if header[0].lower() not in described],
        }
        inner.pop("path_params", None)
        start: Message = {"status": 500, "headers": []}
        chunks: list[bytes] = []

        messages: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Message:
            if not messages:
                # A streamed response asks for a disconnect until its end; without a pause, that would hang the server.
                await asyncio.Event().wait()
            return messages.pop()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            elif message["type"] == "http.response.body":
                chunks.append(message.get("body", b""))

        await self.app(inner, receive, send)
        return start, b"".join(chunks)


class _Exchange:
    """Body and response of one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, fetch: Fetch) -> None:
        self._scope, self._receive, self._send, self._fetch = scope, receive, send, fetch
        self._keys: LensRequest | None = None
        self._refusal: SteeringError | None = None
        self._all_read = False
        self._start: Message | None = None
        self._held = self._is_stream = False
        self._body: list[bytes] = []

    async def receive(self) -> Message:
        """Return the translated body in one message."""
        if self._all_read:
            return await self._receive()
        limit = max_body_bytes(getattr(self._scope["app"].state, "args", None))
        chunks: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                self._all_read = True
                return message
            chunks.append(message.get("body", b""))
            size, more = size + len(chunks[-1]), message.get("more_body", False)
        self._all_read = True
        body = b"".join(chunks)
        if any(word in body for word in _WORDS):
            if size > limit:
                self._refuse(BodyTooLargeError("body", f"exceeds {limit >> 20} MiB; raise --steering-max-body-mib"))
            try:
                body, self._keys = await body_checks().run(translate_body, body, limit)
            except SteeringError as error:
                self._refuse(error)
        return {"type": "http.request", "body": body, "more_body": False}

    def _refuse(self, error: SteeringError) -> NoReturn:
        self._refusal = error
        raise HTTPException(status_code=400, detail=str(error))

    async def send(self, message: Message) -> None:
        """Pass a message on, or hold the response that is replaced or extended after its end.

        Events of a stream pass at once; only the event with the captured rows is replaced.
        """
        if message["type"] == "http.response.start":
            captures = self._keys is not None and self._keys.capture is not None and message["status"] == 200
            content_type = MutableHeaders(scope=message).get("content-type", "")
            self._is_stream = captures and content_type.startswith("text/event-stream")
            self._held = self._refusal is not None or (captures and not self._is_stream)
            self._start = message
        if self._is_stream and RESULTS_EVENT in message.get("body", b""):
            await self._send({**message, "body": await self._with_activations(message["body"])})
        elif not self._held:
            await self._send(message)
        elif message["type"] == "http.response.body":
            self._body.append(message.get("body", b""))

    async def _with_activations(self, events: bytes) -> bytes:
        """Return the events with ``activations`` in the place of captured rows."""
        translated = []
        for event in events.split(b"\n\n"):
            if event.startswith(RESULTS_EVENT):
                document = json.loads(event.removeprefix(b"data: "))
                await add_activations(document, self._keys is not None and self._keys.binary, self._fetch)
                document["object"] = "activations"
                event = b"data: " + json.dumps(document).encode()
            translated.append(event)
        return b"\n\n".join(translated)

    async def finish(self) -> None:
        """Send the refusal, or the held response with ``activations``."""
        if self._refusal is not None:
            await error_response(self._refusal)(self._scope, self._receive, self._send)
        elif self._held and self._start is not None and self._keys is not None:
            document = json.loads(b"".join(self._body))
            await add_activations(document, self._keys.binary, self._fetch)
            response = JSONResponse(document)
            headers = MutableHeaders(raw=[*self._start["headers"]])
            headers["content-length"] = str(len(response.body))
            await self._send({**self._start, "headers": headers.raw})
            await self._send({"type": "http.response.body", "body": response.body})


def translate_body(body: bytes, max_bytes: int) -> tuple[bytes, LensRequest | None]:
    """Return a body without the request keys, and the keys; None if it has none.

    The rights of the current key are checked before any tensor is read.

    Args:
        body: The body.
        max_bytes: Most bytes of all tensors together.

    Raises:
        SteeringError: A key is invalid or not supported, or the body has a key twice.
        ForbiddenError: The API key lacks a right.
    """
    try:
        parsed = ParsedBody(body)
    except (ValueError, RecursionError):
        return body, None  # vLLM refuses it
    document = parsed.value
    if not isinstance(document, dict):
        return body, None
    parsed.require_rights(RIGHTS, PARENTS)
    parsed.refuse_repeated((), translated=True)
    if document.get(LORA_FIELD) is not None:
        document["model"] = read_adapter(document.pop(LORA_FIELD))
    given: dict[str, Any] = {}
    field = PARENTS[0]
    for parent in PARENTS:
        values = document.get(parent)
        if not isinstance(values, dict):
            continue
        found = {key: values.pop(key) for key in KEYS if key in values}
        for key in found:
            if key in given:
                raise SteeringError(f"{parent}.{key}", f"is also in {PARENTS[0]}; give it once")
        field = parent if found else field
        given |= found
        if not values:
            del document[parent]
    keys = None
    if given:
        keys = read_keys(given, field, max_bytes)
        document = to_json(keys.add_to(document, field), "body")
    return json.dumps(document).encode(), keys


async def add_activations(document: dict[str, Any], binary: bool, fetch: Fetch) -> None:
    """Replace captured rows by ``activations``, in each choice and, for the first, at the top."""
    # The choices of an event have no text.
    answers = parse_completion({"choices": [{"text": "", **choice} for choice in document["choices"]]}).choices
    for choice, answer in zip(document["choices"], answers, strict=True):
        report = answer.captures["memory"]
        try:
            choice["activations"] = {"residual_stream": await _stream(report, binary, fetch)}
            results = choice["capture_results"]
            del results["memory"]
            if not results:
                del choice["capture_results"]
        except SteeringError as error:
            choice["activations"], choice["activations_error"] = None, error.problem
    for key in ("activations", "activations_error"):
        if key in document["choices"][0]:
            document[key] = document["choices"][0][key]


async def _stream(report: CaptureAnswer, binary: bool, fetch: Fetch) -> dict[str, Any]:
    if report.status != "ok":
        raise SteeringError("activations", str(report.error))
    if report.id is not None:
        stored = await fetch(report.id)
        if binary:  # clients read the bytes by these facts, not by the headers
            return {"handle": report.id, "transport": "binary", **describe(stored)}
        return await asyncio.to_thread(serialize_tensor, stored)
    tensor = stack_layers({site: rows.rows for site, rows in report.sites.items()})
    return await asyncio.to_thread(serialize_tensor, tensor)


def _header(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _tensor_of_file(data: bytes) -> torch.Tensor:
    return stack_layers({site: rows.rows for site, rows in read_capture_file(data).items()})
