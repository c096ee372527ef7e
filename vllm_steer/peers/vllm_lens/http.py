# SPDX-License-Identifier: Apache-2.0
"""Middleware that serves the request keys of vllm-lens over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar
from urllib.parse import quote

import httpx
import torch
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_steer.client import CaptureAnswer, parse_completion, read_capture_file, to_json
from vllm_steer.errors import SteeringError
from vllm_steer.peers.http import Translated, TranslatingMiddleware, with_path
from vllm_steer.peers.vllm_lens.client import HEADER
from vllm_steer.peers.vllm_lens.keys import (
    CAPTURE_KEY,
    KEYS,
    LORA_FIELD,
    PARENTS,
    REFUSED_KEYS,
    STEERING_KEY,
    read_adapter,
    read_keys,
)
from vllm_steer.peers.vllm_lens.tensors import describe, serialize_tensor, stack_layers, tensor_bytes, zstd
from vllm_steer.server.extension import COUNTED_KEY, app_path

HANDLE_PREFIX = "/v1/activations/"
RESULTS_EVENT = b'data: {"object":"capture_results"'
"""Start of the event of a stream that has the captured rows."""


class VllmLensMiddleware(TranslatingMiddleware):
    """Translate bodies with the request keys, and add ``activations`` to their responses.

    Raises:
        SteeringError: ``zstandard`` is not installed.
    """

    routes = ("/v1/completions", "/v1/chat/completions")
    refused: ClassVar = {"/v1/hooks": SteeringError("apply_hooks", REFUSED_KEYS["apply_hooks"])}
    fields = (*KEYS, LORA_FIELD)
    parents = PARENTS
    rights: ClassVar = {CAPTURE_KEY: "capture", STEERING_KEY: "steering", **dict.fromkeys(REFUSED_KEYS, "steering")}

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app)
        zstd()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = app_path(scope) if scope["type"] == "http" else ""
        if path.startswith(HANDLE_PREFIX) and scope["method"] == "GET":
            response = await self._activations(scope, path.removeprefix(HANDLE_PREFIX))
            await response(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def translate(self, scope: Scope, path: str, document: Mapping[str, Any], limit: int) -> Translated:
        """Return a body without the request keys, whose response gets ``activations``."""
        body = dict(document)
        if body.get(LORA_FIELD) is not None:
            body["model"] = read_adapter(body.pop(LORA_FIELD))
        given: dict[str, Any] = {}
        field = PARENTS[0]
        for parent in PARENTS:
            values = body.get(parent)
            if not isinstance(values, dict):
                continue
            found = {key: values[key] for key in KEYS if key in values}
            for key in found:
                if key in given:
                    raise SteeringError(f"{parent}.{key}", f"is also in {PARENTS[0]}; give it once")
            field = parent if found else field
            given |= found
            body[parent] = {key: value for key, value in values.items() if key not in found}
            if not body[parent]:
                del body[parent]
        if not given:
            return Translated(body)
        keys = read_keys(given, field, limit)
        body = to_json(keys.add_to(body, field), "body")
        if keys.capture is None:
            return Translated(body)
        add = partial(self._add_activations, scope, keys.binary)
        return Translated(body, add, partial(_rewrite_events, add))

    async def _add_activations(self, scope: Scope, binary: bool, document: dict[str, Any]) -> None:
        """Replace captured rows by ``activations``, in each choice and, for the first, at the top."""
        # The choices of an event have no text.
        answers = parse_completion({"choices": [{"text": "", **choice} for choice in document["choices"]]}).choices
        for choice, answer in zip(document["choices"], answers, strict=True):
            report = answer.captures["memory"]
            try:
                choice["activations"] = {"residual_stream": await self._stream(scope, report, binary)}
                results = choice["capture_results"]
                del results["memory"]
                if not results:
                    del choice["capture_results"]
            except SteeringError as error:
                choice["activations"], choice["activations_error"] = None, error.problem
        for key in ("activations", "activations_error"):
            if key in document["choices"][0]:
                document[key] = document["choices"][0][key]

    async def _stream(self, scope: Scope, report: CaptureAnswer, binary: bool) -> dict[str, Any]:
        if report.status != "ok":
            raise SteeringError("activations", str(report.error))
        if report.id is not None:
            stored = await self._fetch(scope, report.id)
            if binary:  # clients read the bytes by these facts, not by the headers
                return {"handle": report.id, "transport": "binary", **describe(stored)}
            return await asyncio.to_thread(serialize_tensor, stored)
        tensor = stack_layers({site: rows.rows for site, rows in report.sites.items()})
        return await asyncio.to_thread(serialize_tensor, tensor)

    async def _activations(self, scope: Scope, handle: str) -> Response:
        """Return the tensor behind a handle, or the server's refusal."""
        stored = await self._get(scope, f"/v1/captures/{quote(handle, safe='')}")
        if stored.status_code != 200:
            response = Response(stored.content, status_code=stored.status_code)
            response.raw_headers += [each for each in stored.headers.raw if each[0].lower() != b"content-length"]
            return response
        tensor = await asyncio.to_thread(_tensor_of_file, stored.content)
        raw = await asyncio.to_thread(tensor_bytes, tensor)
        headers = {
            **{
                f"{HEADER}{name.replace('_', '-')}": value if isinstance(value, str) else json.dumps(value)
                for name, value in describe(tensor).items()
            },
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
        stored = await self._get(counted, f"/v1/captures/{quote(capture_id, safe='')}")
        if stored.status_code != 200:
            raise SteeringError("activations", f"the stored rows cannot be read (HTTP {stored.status_code})")
        return await asyncio.to_thread(_tensor_of_file, stored.content)

    async def _get(self, scope: Scope, path: str) -> httpx.Response:
        """Return the application's answer to GET ``path``, with the caller's credentials."""
        described = (b"content-type", b"content-length", b"transfer-encoding")
        headers = [header for header in scope["headers"] if header[0].lower() not in described]

        async def app(own: Scope, receive: Receive, send: Send) -> None:
            inner = {**with_path(scope, path), **{key: own[key] for key in ("method", "query_string", "headers")}}
            inner.pop("path_params", None)
            await self.app(inner, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.get(path, headers=headers)


async def _rewrite_events(add: Any, events: bytes) -> bytes:
    """Return the events of a stream with ``activations`` in the place of captured rows."""
    if RESULTS_EVENT not in events:
        return events
    translated = []
    for event in events.split(b"\n\n"):
        if event.startswith(RESULTS_EVENT):
            document = json.loads(event.removeprefix(b"data: "))
            await add(document)
            document["object"] = "activations"
            event = b"data: " + json.dumps(document).encode()
        translated.append(event)
    return b"\n\n".join(translated)


def _tensor_of_file(data: bytes) -> torch.Tensor:
    return stack_layers({site: rows.rows for site, rows in read_capture_file(data).items()})
