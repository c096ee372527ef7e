# SPDX-License-Identifier: Apache-2.0
"""``/v1/captures/{id}``: fetching and deleting rows that were too large for an answer.

The routes are the application's own, and so stand behind whatever authentication it has.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response, StreamingResponse

from vllm_steer.serve.flags import store_limits
from vllm_steer.serve.store import CaptureStore

ROUTE = "/v1/captures/{handle}"
_STORE = "vllm_steer_captures"
_PIECE = 1 << 20


def store_of(app: FastAPI) -> CaptureStore:
    """The store of a server; it is made, and its routes are added, when it is first asked for."""
    store: CaptureStore | None = getattr(app.state, _STORE, None)
    if store is None:
        store = CaptureStore(store_limits(getattr(app.state, "args", None)))
        setattr(app.state, _STORE, store)
        _add_routes(app, store)
    return store


def _add_routes(app: FastAPI, store: CaptureStore) -> None:
    async def fetch(handle: str) -> Response:
        data = store.get(handle)
        if data is None:
            return _not_found()
        headers = {
            "content-length": str(len(data)),
            "content-disposition": 'attachment; filename="capture.safetensors"',
            "cache-control": "no-store",
        }
        # In pieces, so that no second copy waits for a slow client.
        return StreamingResponse(_pieces(data), media_type="application/octet-stream", headers=headers)

    async def delete(handle: str) -> Response:
        return Response(status_code=HTTPStatus.NO_CONTENT.value) if store.discard(handle) else _not_found()

    app.add_api_route(ROUTE, fetch, methods=["GET"], response_class=Response, summary="Captured rows, as safetensors")
    app.add_api_route(ROUTE, delete, methods=["DELETE"], response_class=Response, summary="Forget captured rows")


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), _PIECE):
        yield data[start : start + _PIECE]


def _not_found() -> JSONResponse:
    status = HTTPStatus.NOT_FOUND
    problem = "no such capture: it has expired, was deleted, or never was"
    error = {"message": problem, "type": "NotFoundError", "param": "id", "code": status.value}
    return JSONResponse({"error": error}, status_code=status.value)
