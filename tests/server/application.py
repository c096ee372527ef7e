# SPDX-License-Identifier: Apache-2.0
"""A FastAPI application that accepts and ignores unknown fields, like vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI, Form, Request, UploadFile
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, StreamingResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.sampling_params import SamplingParams

from tests.server.fakes import FakeEngine
from vllm_steer.params import has_steering
from vllm_steer.server.http.apply_fields import RequestRefused, apply_to_params
from vllm_steer.server.http.middleware import SteeringMiddleware
from vllm_steer.server.http.request_guard import STEERABLE_ROUTES, UNSTEERABLE_ROUTES


def client_of(app: FastAPI) -> httpx.AsyncClient:
    app.add_middleware(SteeringMiddleware)  # outermost, where vLLM puts --middleware
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


class Body(BaseModel):
    model_config = ConfigDict(extra="allow")


def add_error_handler(app: FastAPI) -> None:
    """Return refusals as vLLM's server does."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        made = create_error_response(error)
        return JSONResponse(made.model_dump(), status_code=made.error.code)

    app.add_exception_handler(RequestRefused, answer)


def make_app(engine: FakeEngine | None, *, root_path: str = "", max_body_mib: int = 1) -> FastAPI:
    app = FastAPI(root_path=root_path)
    add_error_handler(app)
    app.state.args = SimpleNamespace(steering_max_body_mib=max_body_mib)
    if engine is not None:
        app.state.engine_client = engine

    async def carries(body: Body) -> dict[str, Any]:
        return {"steered": has_steering(apply_to_params(body, SamplingParams()))}

    for route in STEERABLE_ROUTES[:-1]:
        app.post(route)(carries)

    @app.post(STEERABLE_ROUTES[-1])  # takes the body itself, and drops what it does not know
    async def invocations(request: Request) -> Any:
        return {"unsteered": sorted(await request.json())}

    app.state.tokenized = 0

    @app.post("/tokenize")
    async def tokenize(body: Body) -> dict[str, str]:
        app.state.tokenized += 1
        return {"unsteered": "yes"}

    async def ignores(body: Body) -> dict[str, str]:
        return {"unsteered": "yes"}

    for route in UNSTEERABLE_ROUTES:
        app.post(route)(ignores)

    @app.post("/raw")
    async def raw(request: Request) -> dict[str, int]:
        return {"length": len(await request.body())}

    @app.post("/stream")
    async def stream(body: Body) -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            for i in range(3):
                yield f"data: {i}\n\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")

    @app.post("/v1/audio/transcriptions")
    async def transcribe(file: UploadFile, prompt: str = Form("")) -> dict[str, int]:
        return {"length": len(await file.read())}

    return app
