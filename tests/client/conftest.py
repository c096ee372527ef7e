# SPDX-License-Identifier: Apache-2.0
"""A server in this process with our routes and a fake model that answers one sentence."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, StreamingResponse

from tests.registry.modules import registry
from vllm_steer.server.routes.modules import add_module_routes

SITES = {"post_block": {"1": {"positions": [2], "dtype": "float32", "shape": [1, 2], "data": "AACAPwAAAEA="}}}
APPLIED = {"epoch": 1, "global": None, "modules": [], "request": "sha256:0"}


def make_app() -> FastAPI:
    app = FastAPI()
    app.state.args = SimpleNamespace(steering_max_body_mib=1)
    app.state.bodies = []
    add_module_routes(app, registry())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "tiny"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await request.json()
        app.state.bodies.append(body)
        modules = body.get("steering_modules")
        if modules and modules[0][0] == "missing":
            error = {"message": "unknown module 'missing'", "type": "BadRequestError", "param": "steering_modules[0]"}
            return JSONResponse({"error": {**error, "code": 400}}, status_code=400)
        words = ["I ", "am ", f"{modules[0][0]}\x1b[2J." if modules else "plain."]
        applied = {"steering_applied": APPLIED} if modules else {}
        if not body.get("stream"):
            choice = {"message": {"content": "".join(words)}, "finish_reason": "stop"}
            if "capture" in body:
                choice["capture_results"] = {"memory": {"status": "ok", "error": None, "sites": SITES}}
            return {**applied, "choices": [choice]}

        async def events() -> AsyncIterator[str]:
            for i, word in enumerate(words):
                delta = {"choices": [{"index": 0, "delta": {"content": word}}]}
                yield f"data: {json.dumps({**(applied if i == 0 else {}), **delta})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


@pytest.fixture
def app() -> FastAPI:
    return make_app()


@pytest.fixture
def url(app: FastAPI) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()
