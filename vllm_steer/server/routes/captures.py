# SPDX-License-Identifier: Apache-2.0
"""``/v1/captures/{id}``: fetching and deleting what was too large for an answer.

What another key has made is not there: not by a check of whose it is, but since it is not looked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import Response, StreamingResponse

from vllm_steer.server.auth.current_key import current_owner
from vllm_steer.server.auth.rights import Right
from vllm_steer.server.capture_store import CaptureStore, MediaKind, Stored
from vllm_steer.server.flags import spool_name, store_limits
from vllm_steer.server.routes.base import RESPONSES, SteeringRoute, UnknownCaptureError, needs

ROUTE = "/v1/captures/{handle}"
_STORE = "vllm_steer_captures"
_PIECE = 1 << 20
_MEDIA: Mapping[MediaKind, str] = MappingProxyType(
    {"safetensors": "application/octet-stream", "json": "application/json"}
)


def store_of(app: FastAPI) -> CaptureStore:
    """The store of a server; it is made, and its routes are added, when it is first asked for."""
    store: CaptureStore | None = getattr(app.state, _STORE, None)
    if store is None:
        args = getattr(app.state, "args", None)
        store = CaptureStore(store_limits(args), spool_name(args))
        setattr(app.state, _STORE, store)
        app.include_router(make_router(store))
    return store


def make_router(store: CaptureStore) -> APIRouter:
    """The routes over ``store``."""

    async def fetch(handle: str) -> Response:
        """The rows, in a safetensors file, or what else a consumer reported, in JSON."""
        stored = await asyncio.to_thread(store.open, handle, current_owner())
        if stored is None:
            raise _unknown()
        headers = {
            "content-length": str(stored.size),
            "content-disposition": f'attachment; filename="capture.{stored.kind}"',
            "cache-control": "no-store",
        }
        return StreamingResponse(_pieces(stored), media_type=_MEDIA[stored.kind], headers=headers)

    async def delete(handle: str) -> Response:
        """Make room before it expires."""
        if not await asyncio.to_thread(store.discard, handle, current_owner()):
            raise _unknown()
        return Response(status_code=HTTPStatus.NO_CONTENT.value)

    router = APIRouter(route_class=SteeringRoute, responses=RESPONSES)
    file: dict[int | str, dict[str, Any]] = {
        200: {"description": "The file", "content": {media: {} for media in _MEDIA.values()}}
    }
    router.add_api_route(
        ROUTE, fetch, methods=["GET"], response_class=Response, responses=file,
        summary="What was captured, as a file", openapi_extra=needs(Right.CAPTURE),
    )  # fmt: skip
    router.add_api_route(
        ROUTE, delete, methods=["DELETE"], response_class=Response, status_code=HTTPStatus.NO_CONTENT,
        summary="Forget what was captured", openapi_extra=needs(Right.CAPTURE),
    )  # fmt: skip
    return router


async def _pieces(stored: Stored) -> AsyncIterator[bytes]:
    with stored.file as file:
        while piece := await asyncio.to_thread(file.read, _PIECE):
            yield piece


def _unknown() -> UnknownCaptureError:
    return UnknownCaptureError("id", "no such capture: it has expired, was deleted, or never was")
