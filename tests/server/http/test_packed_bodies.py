# SPDX-License-Identifier: Apache-2.0
"""Packing of vectors in bodies: the meaning of the body stays the same."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st

from tests.server.application import client_of
from tests.server.fakes import FakeEngine
from vllm_steer import SteeringError
from vllm_steer.params import compile_fields
from vllm_steer.server.http.field_scanner import find_fields
from vllm_steer.server.http.packed_bodies import MIN_NUMBERS, pack_body

NUMBERS = np.random.default_rng(0).standard_normal(MIN_NUMBERS).tolist()


def packed(document: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps(document).encode()
    found = find_fields(body).document
    made: dict[str, Any] = json.loads(body if found is None else pack_body(body, found))
    return made


def fields(vector: Any) -> dict[str, Any]:
    return {
        "steering_vectors": {"post_block": {"1": vector, "2": {"vector": vector, "scale": 0.5}}},
        "decode_steering_vectors": {"pre_attn": {"0": vector}},
    }


@given(st.lists(st.floats(-1e38, 1e38) | st.integers(-(2**70), 2**70), min_size=MIN_NUMBERS, max_size=MIN_NUMBERS))
def test_packed_vectors_are_the_same_vectors(numbers: list[float]) -> None:
    """Catches a vector that differs in one bit from the one in the body, and one at another site or scale."""
    found = packed(fields(numbers))
    assert all("data" in found[name][point][layer] for name, point, layer in (
        ("steering_vectors", "post_block", "1"), ("decode_steering_vectors", "pre_attn", "0")
    ))  # fmt: skip
    assert compile_fields(found) == compile_fields(fields(numbers))


def test_the_rest_of_the_body_stays() -> None:
    """Catches a body that loses or changes something beside its vectors."""
    others = {
        "prompt": "ü \\ \u2028",
        "seed": 2**70,
        "top_p": 0.1 + 0.2,
        "stop": ["\0", None],
        "logit_bias": {"1": -0.0},
    }
    found = packed({**others, **fields(NUMBERS), "steering": [{"kind": "add", "vector": NUMBERS}]})
    assert {name: found[name] for name in others} == others
    assert found["steering"] == [{"kind": "add", "vector": NUMBERS}]
    assert list(found) == [*others, "steering_vectors", "decode_steering_vectors", "steering"]


@pytest.mark.parametrize(
    "vector", [[*NUMBERS, True], [*NUMBERS, "1"], [*NUMBERS, None], [*NUMBERS, 1e39], [*NUMBERS, [1.0]], [NUMBERS], 5]
)
def test_invalid_vectors_keep_their_error(vector: Any) -> None:
    """Catches an error about a packed vector, which the client has not sent, and an invalid number that is accepted."""
    problems = []
    for each in (fields(vector), packed(fields(vector))):
        with pytest.raises(SteeringError) as error:
            compile_fields(each)
        problems.append((error.value.field, error.value.problem))
    assert problems[0] == problems[1]


@pytest.mark.parametrize("given_fields", [
    {"steering_vectors": 5}, {"steering_vectors": [NUMBERS]}, {"steering_vectors": {"post_block": NUMBERS}},
    {"steering_vectors": {"post_block": {"1": [1.0, 2.0]}}}, {"capture": {"memory": {"hooks": {"post_block": [1]}}}},
])  # fmt: skip
def test_bodies_without_long_vectors_stay(given_fields: dict[str, Any]) -> None:
    """Catches a body that is encoded anew for nothing, and an exception for a wrong form."""
    body = json.dumps(given_fields).encode()
    found = find_fields(body)
    assert found.document is not None
    assert pack_body(body, found.document) is body


async def test_the_application_gets_packed_vectors() -> None:
    """Catches vectors whose numbers vLLM's JSON parser reads one by one, and a body that loses its prompt."""
    app = FastAPI()
    app.state.engine_client = FakeEngine()

    seen = []

    @app.post("/v1/completions")
    async def respond(request: Request) -> None:
        seen.append(await request.json())

    client: httpx.AsyncClient = client_of(app)
    await client.post("/v1/completions", json={"prompt": "text", **fields(NUMBERS)})
    assert seen[0]["prompt"] == "text"
    assert seen[0]["steering_vectors"]["post_block"]["1"]["shape"] == [MIN_NUMBERS]
