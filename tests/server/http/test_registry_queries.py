# SPDX-License-Identifier: Apache-2.0
"""Queries of a registry that another machine stores."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from vllm.sampling_params import SamplingParams

from tests.server.application import Body, add_error_handler
from tests.server.fakes import FakeEngine, engine_context, vector
from vllm_steer.frontend import context as contexts
from vllm_steer.frontend.requests import complete_params_async
from vllm_steer.registry.errors import RegistryUnavailableError
from vllm_steer.registry.storage import MemoryStore
from vllm_steer.server.http import apply_fields, error_response
from vllm_steer.server.http.apply_fields import apply_to_params
from vllm_steer.server.http.middleware import SteeringMiddleware

ROUTE = "/v1/completions"
ROWS = {"kind": "replace", "point": "post_block", "layers": 1, "vector": {"module": "calm/probe"}}


class RemoteStore(MemoryStore):
    """A store that notes the threads that query it."""

    is_remote = True

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []

    def is_stale(self) -> bool:
        self.threads.append(threading.current_thread())
        return False


@pytest.mark.parametrize("fields", [{}, {"steering_modules": ["calm"]}, {"steering": [ROWS]}])
async def test_the_event_loop_does_not_query(fields: dict[str, Any]) -> None:
    """Catches requests that stop all others of the server while one waits for the database."""
    store = RemoteStore()
    context = engine_context(store=store)
    context.registry.register("calm", base={"post_block": {1: vector()}}, probes={"probe": vector()})
    engine = FakeEngine()
    setattr(engine.input_processor, contexts._CONTEXT, context)
    app = FastAPI()
    add_error_handler(app)
    app.state.engine_client = engine

    @app.post(ROUTE)
    async def complete(body: Body) -> dict[str, int]:
        params = await complete_params_async(engine, apply_to_params(body, SamplingParams()))
        return {"keys": len(params.extra_args)}

    app.add_middleware(SteeringMiddleware)
    store.threads.clear()
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")
    response = await client.post(ROUTE, json=fields)
    assert response.status_code == 200, response.text
    assert store.threads and threading.current_thread() not in store.threads


def test_the_place_of_the_registry_is_not_told() -> None:
    """Catches host, port and database, or a path, in the answer to any client."""
    place = "postgresql://***@db.internal:5432/steer: connection to server at 10.0.0.7 failed"
    error = RegistryUnavailableError("steering registry", "its database cannot be used", place)
    assert place in str(error)
    body = json.loads(bytes(error_response.error_response(error).body))
    assert body["error"]["message"] == "steering registry: its database cannot be used"
    assert apply_fields.refused(error).problem == "its database cannot be used"
