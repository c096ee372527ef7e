# SPDX-License-Identifier: Apache-2.0
"""The metric of refused HTTP requests."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY

from tests.registry.modules import registry
from tests.server.application import make_app
from tests.server.fakes import FakeEngine, engine_context, vector
from vllm_steer.frontend.context import EngineContext
from vllm_steer.metrics.collectors import start
from vllm_steer.metrics.definitions import METRICS_BY_KEY, REFUSED_FIELDS
from vllm_steer.metrics.requests import count_refusal
from vllm_steer.server.http.middleware import SteeringMiddleware
from vllm_steer.server.routes.modules import add_module_routes

STEER = {"steering_vectors": {"post_block": {"1": vector()}}}
NAME = f"{METRICS_BY_KEY['refused_requests'].name}_total"


def counts() -> Counter[tuple[str, str]]:
    """Return the current counts by status and field."""
    found: Counter[tuple[str, str]] = Counter()
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name == NAME:
                found[sample.labels["status"], sample.labels["field"]] += int(sample.value)
    return found


@pytest.fixture
def app() -> FastAPI:
    start({})
    engine = FakeEngine()
    kept: EngineContext = engine_context()
    engine.input_processor = SimpleNamespace(_steering_context=kept)
    made = make_app(engine)
    add_module_routes(made, registry())
    made.add_middleware(SteeringMiddleware)
    return made


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/tokenize", STEER, 400, "steering_vectors"),
        ("/invocations", STEER, 400, "steering_vectors"),
        ("/v1/completions", {"steering": [{}], "padding": " " * (1 << 20)}, 413, "body"),
        ("/v1/steering/set", {}, 400, "set"),
        ("/v1/steering/set", {"a client's word": 1}, 400, "other"),
        ("/v1/steering/modules", {"name": "a/b", "base": {"post_block": {"1": vector()}}}, 400, "name"),
    ],
)
async def test_counts_each_refusal_once(app: FastAPI, path: str, body: dict[str, Any], status: int, field: str) -> None:
    """Catches refusals that are not counted or counted twice, and a wrong field."""
    before = counts()
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    assert counts() - before == Counter({(str(status), field): 1})


async def test_counts_no_successful_requests(app: FastAPI) -> None:
    """Catches successful requests counted as refusals."""
    before = counts()
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        assert (await client.post("/v1/completions", json=STEER)).status_code == 200
        assert (await client.post("/tokenize", json={"a": 1})).status_code == 200
        assert (await client.get("/v1/steering/nothing")).status_code == 404
    assert counts() == before


@pytest.mark.parametrize(
    ("field", "label"),
    [
        ("steering_vectors.post_block[1]", "steering_vectors"),
        ("steering[0]: low", "steering"),
        ("capture.filesystem.hooks", "capture"),
        ("steering registry", "steering registry"),
        ("extra_args.steer", "other"),
        ("x" * 1000, "other"),
        ("", "other"),
    ],
)
def test_label_values_are_bounded(field: str, label: str) -> None:
    """Catches a client that creates a time series per request with names of its own."""
    start({})
    before = counts()
    count_refusal(400, field)
    assert counts() - before == Counter({("400", label): 1})
    assert label in REFUSED_FIELDS
