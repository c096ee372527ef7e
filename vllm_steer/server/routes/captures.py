# SPDX-License-Identifier: Apache-2.0
"""``/v1/captures/{id}``: fetch and delete captures that were too large for a response.

Captures of other keys are not found, because the owner is part of the lookup.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI
from fastapi import Path as PathParameter
from starlette.responses import Response, StreamingResponse

from vllm_steer.server.auth.current_key import current_owner
from vllm_steer.server.auth.rights import Right
from vllm_steer.server.capture_store import CaptureFormat, CaptureStore, StoredCapture
from vllm_steer.server.http.error_response import UnknownCaptureError
from vllm_steer.server.routes.base import RESPONSES, SteeringRoute, requires
from vllm_steer.server.settings import capture_store_name, store_limits

ROUTE = "/v1/captures/{id}"
CaptureId = Annotated[str, PathParameter(alias="id")]
_STORE = "vllm_steer_captures"
_CHUNK = 1 << 20
_MEDIA_TYPES: Mapping[CaptureFormat, str] = MappingProxyType(
    {"safetensors": "application/octet-stream", "json": "application/json"}
)


def capture_store_of(app: FastAPI) -> CaptureStore:
    """Return the server's store. The first call creates it and adds its routes."""
    store: CaptureStore | None = getattr(app.state, _STORE, None)
    if store is None:
        args = getattr(app.state, "args", None)
        store = CaptureStore(store_limits(args), capture_store_name(args))
        setattr(app.state, _STORE, store)
        app.include_router(make_router(store))
    return store


def make_router(store: CaptureStore) -> APIRouter:
    """Return the routes that serve ``store``."""

    async def fetch(capture_id: CaptureId) -> Response:
        """Fetch the rows as a safetensors file, or a consumer's report as JSON."""
        capture = await asyncio.to_thread(store.open, capture_id, current_owner())
        if capture is None:
            raise _unknown()
        headers = {
            "content-length": str(capture.size),
            "content-disposition": f'attachment; filename="capture.{capture.format}"',
            "cache-control": "no-store",
        }
        return StreamingResponse(_chunks(capture), media_type=_MEDIA_TYPES[capture.format], headers=headers)

    async def delete(capture_id: CaptureId) -> Response:
        """Delete a capture before it expires."""
        if not await asyncio.to_thread(store.delete, capture_id, current_owner()):
            raise _unknown()
        return Response(status_code=HTTPStatus.NO_CONTENT.value)

    router = APIRouter(route_class=SteeringRoute, responses=RESPONSES)
    file: dict[int | str, dict[str, Any]] = {
        200: {"description": "The file", "content": {media_type: {} for media_type in _MEDIA_TYPES.values()}}
    }
    router.add_api_route(
        ROUTE, fetch, methods=["GET"], response_class=Response, responses=file,
        summary="Fetch a capture", openapi_extra=requires(Right.CAPTURE),
    )  # fmt: skip
    router.add_api_route(
        ROUTE, delete, methods=["DELETE"], response_class=Response, status_code=HTTPStatus.NO_CONTENT,
        summary="Delete a capture", openapi_extra=requires(Right.CAPTURE),
    )  # fmt: skip
    return router


async def _chunks(capture: StoredCapture) -> AsyncIterator[bytes]:
    with capture.file as file:
        while chunk := await asyncio.to_thread(file.read, _CHUNK):
            yield chunk


def _unknown() -> UnknownCaptureError:
    return UnknownCaptureError("id", "no such capture: it has expired, was deleted, or never existed")
