# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware that serves the fork's request fields and routes over HTTP.

It runs ahead of the steering middleware and translates bodies and paths, so API keys, quotas and checks apply to the
translated requests. A body is read only when the server reads it, which is after authentication.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import HTTPException
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_steer.errors import SteeringError
from vllm_steer.peers.bodies import ParsedBody, refuse_path
from vllm_steer.peers.rhizonymph.fields import CLAMP_FIELDS, FIELDS, MODULE_FIELDS, translate_fields
from vllm_steer.peers.rhizonymph.packed import read_hooks
from vllm_steer.server.http.body_checks import body_checks
from vllm_steer.server.http.error_response import BodyTooLargeError, error_response
from vllm_steer.server.routes.base import app_path
from vllm_steer.server.routes.capabilities import ROUTE as CAPABILITIES
from vllm_steer.server.settings import max_body_bytes

REQUESTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
PATHS: Mapping[tuple[str, str], str] = {
    ("GET", "/v1/steering"): "/v1/steering/set",
    ("GET", "/v1/steering/layers"): CAPABILITIES,
    ("POST", "/v1/steering/modules/register"): "/v1/steering/modules",
}
"""Our routes by method and path of the fork."""
SETTERS = ("/v1/steering/set", "/v1/steering/modules")
DYNAMIC = "/v1/steering/dynamic"
DYNAMIC_PROBLEM = SteeringError("dynamic", f"{DYNAMIC} is not supported; the gates of a request are in its answer")
_WORDS = tuple(f'"{name}"'.encode() for name in (*FIELDS, *MODULE_FIELDS, *CLAMP_FIELDS))
RIGHTS = {name: "capture" if name.startswith("capture") else "steering" for name in FIELDS}
"""Our fields by the fork's fields that become them, or that are refused."""
RESULTS = "capture_results"


class RhizonymphMiddleware:
    """Translate bodies and paths, and add ``capture_results`` to the top of responses."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = app_path(scope) if scope["type"] == "http" else ""
        method = scope.get("method", "")
        if path.startswith(DYNAMIC):
            await refuse_path(self.app, scope, receive, send, DYNAMIC_PROBLEM)
            return
        if (method, path) in PATHS:
            root = scope["path"][: len(scope["path"]) - len(path)]
            path = PATHS[method, path]
            scope = {**scope, "path": root + path, "raw_path": (root + path).encode()}
        if method == "POST" and path in (*REQUESTS, *SETTERS):
            exchange = _Exchange(scope, receive, send, translate_fields if path in REQUESTS else rename_vectors)
            await self.app(scope, exchange.receive, exchange.send)
            await exchange.finish()
        else:
            await self.app(scope, receive, send)


def rename_vectors(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body of ``/v1/steering/set`` or of a module with our names of the vector fields.

    Raises:
        SteeringError: A field is given by both names, or is invalid.
    """
    fields = dict(document)
    for theirs, ours in MODULE_FIELDS.items():
        if theirs in fields:
            if ours in fields:
                raise SteeringError(theirs, f"is the field {ours}, which is also given; send one of them")
            fields[ours] = fields.pop(theirs)
        if ours in fields:
            fields[ours] = read_hooks(fields[ours], ours)
    for name in CLAMP_FIELDS:
        if fields.pop(name, None) is not None:
            raise SteeringError(name, "is not supported; use steering with kind clamp")
    return fields


class _Exchange:
    """Body and response of one request."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, translate: Callable[[Mapping[str, Any]], dict[str, Any]]
    ) -> None:
        self._scope, self._receive, self._send, self._translate = scope, receive, send, translate
        self._refusal: SteeringError | None = None
        self._read = self._captures = self._held = False
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
        if any(word in body for word in _WORDS):
            limit = max_body_bytes(getattr(self._scope["app"].state, "args", None))
            try:
                if len(body) > limit:
                    raise BodyTooLargeError("body", f"exceeds {limit >> 20} MiB; raise --steering-max-body-mib")
                body = await body_checks().run(self._translated, body)
            except SteeringError as error:
                self._refusal = error
                raise HTTPException(status_code=400, detail=str(error)) from None
        return {"type": "http.request", "body": body, "more_body": False}

    def _translated(self, body: bytes) -> bytes:
        try:
            parsed = ParsedBody(body)
        except (ValueError, RecursionError):
            return body  # vLLM refuses it
        document = parsed.value
        if not isinstance(document, dict):
            return body
        if self._translate is translate_fields:  # the other routes have their own rights, which are checked first
            parsed.require_rights(RIGHTS)
        translated = self._translate(document)
        parsed.refuse_repeated((*FIELDS, *MODULE_FIELDS), translated=translated != document)
        self._captures = "capture" in translated and not translated.get("stream")
        # A body without fields of the fork stays as it is, with its duplicate keys for the checks that follow.
        return body if translated == document else json.dumps(translated).encode()

    async def send(self, message: Message) -> None:
        """Pass a message on, or hold the response that is replaced or extended after its end."""
        if message["type"] == "http.response.start":
            self._start = message
            self._held = self._refusal is not None or (self._captures and message["status"] == 200)
        if not self._held:
            await self._send(message)
        elif message["type"] == "http.response.body":
            self._body.append(message.get("body", b""))

    async def finish(self) -> None:
        """Send the refusal, or the held response with ``capture_results`` at its top."""
        if self._refusal is not None:
            await error_response(self._refusal)(self._scope, self._receive, self._send)
        elif self._held:
            response = JSONResponse(with_results(json.loads(b"".join(self._body))))
            headers = MutableHeaders(raw=[*self._start["headers"]])
            headers["content-length"] = str(len(response.body))
            await self._send({**self._start, "headers": headers.raw})
            await self._send({"type": "http.response.body", "body": response.body})


def with_results(document: dict[str, Any]) -> dict[str, Any]:
    """Return a response with the capture results of the first choice at its top, and file paths as ``payload``."""
    choices = document.get("choices") or [document]
    for choice in choices:
        for report in (choice.get(RESULTS) or {}).values():
            data = report.get("data")
            if isinstance(data, Mapping) and "path" in data:
                report["payload"] = [data["path"]]
    if RESULTS in choices[0]:
        document[RESULTS] = choices[0][RESULTS]
    return document
