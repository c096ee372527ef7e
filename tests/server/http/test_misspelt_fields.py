# SPDX-License-Identifier: Apache-2.0
"""Misspelt fields in bodies of routes that run the model but cannot steer."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.server.application import client_of, make_app
from tests.server.fakes import FakeEngine
from tests.server.http.test_middleware import FIELDS, ROUTE, refusal
from vllm_steer.server.http import misspelt_fields
from vllm_steer.server.http.request_guard import UNSTEERABLE_ROUTES

MISSPELT = {
    "steering_vector": "did you mean steering_vectors",
    "Steering-Vectors": "did you mean steering_vectors",
    "captrue": "did you mean capture",
    "stop_no": "did you mean stop_on",
    "apply_steering_vectors": "field of vllm-lens",
    "ste\u0435ring": "unknown field",
}


@pytest.mark.parametrize("route", sorted(UNSTEERABLE_ROUTES))
@pytest.mark.parametrize(("name", "words"), MISSPELT.items())
async def test_refuses_misspelt_fields_where_none_can_be_steered(
    name: str, words: str, route: str, client: httpx.AsyncClient
) -> None:
    """Catches a fluent, unsteered HTTP 200 for a misspelt field, or one of another project."""
    error = refusal(await client.post(route, json={"model": "m", name: {"a": 1}}))
    assert error["param"] == name
    assert words in error["message"] and f"{route} cannot steer" in error["message"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32-be"])
async def test_finds_misspelt_fields_in_other_encodings(encoding: str, client: httpx.AsyncClient) -> None:
    """Catches names that JSON parsers see and a search in UTF-8 does not."""
    body = json.dumps({"steering_vector": {}}).encode(encoding)
    headers = {"content-type": "application/json"}
    assert refusal(await client.post("/v1/messages", content=body, headers=headers))["param"] == "steering_vector"


ANTHROPIC = {
    "messages": [{"role": "user", "content": "captures steering_vector", "steering_vector": 1}],
    "metadata": {"user_id": "x", "steer": True, "capture": {}},
    "tools": [{"name": "steer", "input_schema": {"properties": {"captures": {}, "steering_name": {}}}}],
    "stop_sequences": ["steering"],
    "stream": False,
    "container": None,
    "mcp_servers": [],
    "context_management": {},
    "betas": [],
    "output_config": {},
    "capture_id": 1,
    "steering_vector": None,
}


async def test_misspelt_fields_elsewhere_pass(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Catches refusals of nested keys, values, null and fields of the route's own API, and of routes without a model.

    Also catches a plain request that waits for the engine.
    """
    for body in (ANTHROPIC, {"state": {"steer": 1}, "questions": {"steering_vector": {}}}):
        assert (await client.post("/v1/messages", json=body)).json() == {"unsteered": "yes"}
    headers = {"content-type": "application/json"}
    for text in (b"", b"[1]", b"{", b'{"a": "\xff"}', b"[" * 100_000):
        response = await client.post("/v1/messages", content=text, headers=headers)
        assert response.status_code in (400, 422) and "detail" in response.json()  # FastAPI's own refusal
    assert (await client.post("/tokenize", json={"steering_vector": 1})).status_code == 200
    assert engine.calls == []


async def test_misspelt_fields_without_enable_steering() -> None:
    """Catches a server without steering that refuses what stock vLLM serves, and one that ignores `steering_vector`."""
    client = client_of(make_app(FakeEngine(steering=False)))
    assert (await client.post("/v1/messages", json={"captures": {}, "lora_request": {}})).status_code == 200
    refusal(await client.post("/v1/messages", json={"steering_vector": {}}))


async def test_compares_a_limited_number_of_names(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a body of many keys, each of which is compared with all fields, that blocks the server for a minute."""
    compared: list[str] = []
    monkeypatch.setattr(misspelt_fields, "problem_of", lambda name: compared.append(name))
    body = {f"key{i}": 0 for i in range(5_000)}
    for route in ("/v1/messages", ROUTE):
        compared.clear()
        await client.post(ROUTE, json=FIELDS)  # the engine is known from here on
        await client.post(route, json=body)
        assert len(compared) == misspelt_fields._MAX_NAMES
