# SPDX-License-Identifier: Apache-2.0
"""Model names of the patching routes, on a small application."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.server.fakes import FakeEngine, engine_context
from vllm_steer.server.routes.base import PATCH_SWEEP_ROUTE
from vllm_steer.server.routes.patch import ROUTE, add_patch_routes

ALIASES = ["tiny", "small"]


def field_of(route: str, model: str, served: Any) -> str:
    """Return the field that a study without fields, on a server with the names ``served``, is refused for."""
    engine = FakeEngine()
    engine.vllm_config.scheduler_config = SimpleNamespace(policy="fcfs")
    app = FastAPI()
    app.state.args = SimpleNamespace(served_model_name=served)
    add_patch_routes(app, engine, engine_context())

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(route, json={"model": model})

    response = asyncio.run(post())
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["param"])


@pytest.mark.parametrize("route", [ROUTE, PATCH_SWEEP_ROUTE])
def test_every_served_name_is_accepted(route: str) -> None:
    """Catches a study that is refused under the second name of `--served-model-name`, and one of an unknown model."""
    for served, model in ((ALIASES, "tiny"), (ALIASES, "small"), ("small", "small"), (None, "tiny")):
        assert field_of(route, model, served) != "model"
    for served, model in ((ALIASES, "sma"), ("small", "s"), (None, "small")):
        assert field_of(route, model, served) == "model"
