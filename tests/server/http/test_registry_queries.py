# SPDX-License-Identifier: Apache-2.0
"""Queries of a registry that another machine stores."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from vllm.sampling_params import SamplingParams

from tests.server.application import Body, add_error_handler
from tests.server.fakes import FakeEngine, engine_context, vector
from tests.server.hostile.case import CLEAR, MODULES
from vllm_steer.frontend import context as contexts
from vllm_steer.frontend.requests import complete_params_async
from vllm_steer.registry.errors import RegistryUnavailableError
from vllm_steer.registry.storage import MemoryStore
from vllm_steer.server.http import apply_fields, error_response
from vllm_steer.server.http.apply_fields import apply_to_params
from vllm_steer.server.http.middleware import SteeringMiddleware
from vllm_steer.server.routes.modules import add_module_routes

ROUTE = "/v1/completions"
ROWS = {"kind": "replace", "point": "post_block", "layers": 1, "vector": {"module": "calm/probe"}}


class RemoteStore(MemoryStore):
    """A store that notes the threads that query it."""

    is_remote = True

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []
        self.answers = threading.Event()
        self.answers.set()

    def is_stale(self) -> bool:
        self.threads.append(threading.current_thread())
        assert self.answers.wait(60)
        return False


def serve(store: RemoteStore) -> httpx.AsyncClient:
    """Return a client of a server with the routes for modules, whose completions count the keys of the parameters."""
    context = engine_context(store=store)
    context.registry.register("calm", base={"post_block": {1: vector()}}, probes={"probe": vector()})
    engine = FakeEngine()
    setattr(engine.input_processor, contexts._CONTEXT, context)
    app = FastAPI()
    add_error_handler(app)
    app.state.engine_client = engine
    add_module_routes(app, context.registry)

    @app.get("/health")
    async def health() -> None: ...

    @app.post(ROUTE)
    async def complete(body: Body) -> dict[str, int]:
        params = await complete_params_async(engine, apply_to_params(body, SamplingParams()))
        return {"keys": len(params.extra_args or {})}

    app.add_middleware(SteeringMiddleware)
    store.threads.clear()
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


@pytest.mark.parametrize("fields", [{}, {"steering_modules": ["calm"]}, {"steering": [ROWS]}])
async def test_the_event_loop_does_not_query(fields: dict[str, Any]) -> None:
    """Catches requests that stop all others of the server while one waits for the database."""
    store = RemoteStore()
    client = serve(store)
    response = await client.post(ROUTE, json=fields)
    assert response.status_code == 200, response.text
    assert store.threads and threading.current_thread() not in store.threads


async def test_a_database_without_an_answer_delays_no_other_work() -> None:
    """Catches requests that wait for the database in the threads that clear steering, and one query for each of them.

    A client that leaves does not cancel the query for the others.
    """
    store = RemoteStore()
    client = serve(store)
    store.answers.clear()
    waiting = [asyncio.ensure_future(client.post(ROUTE, json={"steering_modules": ["calm"]})) for _ in range(64)]
    waiting += [asyncio.ensure_future(client.get(MODULES)) for _ in range(8)]
    while len(store.threads) < 5:  # a query of the completions, and four of the route
        await asyncio.sleep(0.01)
    queries = sum("query" in thread.name for thread in store.threads)
    waiting.pop(0).cancel()
    cleared = await client.post(CLEAR)
    assert cleared.status_code == 200, cleared.text
    assert (await client.get("/health")).status_code == 200
    assert not any(each.done() for each in waiting)
    store.answers.set()
    answers = await asyncio.gather(*waiting)
    assert {answer.status_code for answer in answers} == {200}
    assert queries == 1 and sum("query" in thread.name for thread in store.threads) <= 2


async def test_completions_do_not_wait_for_routes_of_the_registry() -> None:
    """Catches completions, with and without names, that wait behind requests for modules that the database holds up."""
    store = RemoteStore()
    client = serve(store)
    held, registry_thread = store.answers, "vllm-steer-registry_"
    store.is_stale = lambda: threading.current_thread().name.startswith(registry_thread) and not held.wait(60)  # type: ignore[method-assign]
    held.clear()
    waiting = [asyncio.ensure_future(client.get(MODULES)) for _ in range(32)]
    await asyncio.sleep(0)
    for fields in ({}, {"steering_modules": ["calm"]}):
        assert (await client.post(ROUTE, json=fields)).status_code == 200
    assert not any(each.done() for each in waiting)
    held.set()
    await asyncio.gather(*waiting)


def test_the_place_of_the_registry_is_not_told() -> None:
    """Catches host, port and database, or a path, in the answer to any client."""
    place = "postgresql://***@db.internal:5432/steer: connection to server at 10.0.0.7 failed"
    error = RegistryUnavailableError("steering registry", "its database cannot be used", place)
    assert place in str(error)
    body = json.loads(bytes(error_response.error_response(error).body))
    assert body["error"]["message"] == "steering registry: its database cannot be used"
    assert apply_fields.refused(error).problem == "its database cannot be used"
