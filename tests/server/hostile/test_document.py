# SPDX-License-Identifier: Apache-2.0
"""Valid and invalid requests generated from the server's OpenAPI document.

No request ends in HTTP 500, and every response of a steering route matches the document. By default the tests draw a
few requests with fixed seeds; `pytest tests/server/hostile/test_document.py --hostile 2000` draws 2,000 at random.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.hostile.case import CLEAR, MODULES, PROMPT, SET, VALID_BODIES, greedy
from tests.server.server import MODEL
from vllm_steer.params import FIELDS

EXAMPLES = 20
OURS = [
    ("post", MODULES), ("get", MODULES), ("get", f"{MODULES}/{{name}}"), ("delete", f"{MODULES}/{{name}}"),
    ("post", "/v1/steering/requests/{id}"), ("post", "/v1/steering/patch"),
    ("post", SET), ("get", SET), ("post", CLEAR), ("get", "/v1/steering/capabilities"),
    ("get", "/v1/captures/{id}"), ("delete", "/v1/captures/{id}"),
]  # fmt: skip
# Operations without query and body. Any text is valid in their paths, so they have no invalid requests.
ALWAYS_VALID = {
    ("get", MODULES), ("delete", f"{MODULES}/{{name}}"), ("post", CLEAR), ("get", "/v1/steering/capabilities"),
    ("get", "/v1/captures/{id}"), ("delete", "/v1/captures/{id}"),
}  # fmt: skip
# Route -> the name of its body's schema, and required fields of a body.
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/completions": ("CompletionRequest", {"prompt": PROMPT, "max_tokens": 1}),
    "/v1/chat/completions": (
        "ChatCompletionRequest", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
    ),
    "/v1/responses": ("ResponsesRequest", {"input": PROMPT, "max_output_tokens": 1}),
}  # fmt: skip
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def steering_part(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document reduced to steering routes, and to steering fields in the bodies of vLLM's routes."""
    paths = {path: item for path, item in document["paths"].items() if path in {path for _, path in OURS}}
    for route, (name, needed) in BODIES.items():
        properties = document["components"]["schemas"][name]["properties"]
        required = {"model": MODEL, **needed}
        schema = {
            "type": "object",
            "properties": {
                **{key: {"const": value} for key, value in required.items()},
                **{field: properties[field] for field in FIELDS},
            },
            "required": list(required),
            "additionalProperties": False,
        }
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[route] = {"post": {"requestBody": body, "responses": {"default": {"description": "any"}}}}
    return {**document, "paths": paths}


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> Any:
    return client.get("/openapi.json").json()


@pytest.fixture(scope="module")
def schema(document: Any, url: str) -> Any:
    made = schemathesis.openapi.from_dict(steering_part(document))
    made.config.update(base_url=url)
    return made


@pytest.fixture(autouse=True)
def clean_up(client: httpx.Client) -> Iterator[None]:
    """Remove modules and global steering, and check that the server responds as before."""
    before = greedy(client)
    yield
    assert client.post(CLEAR).status_code == 200
    for module in client.get(MODULES).json()["data"]:
        assert client.delete(f"{MODULES}/{module['name']}").status_code == 200
    assert greedy(client) == before


OPERATIONS = [
    pytest.param(method, path, mode, id=f"{method}-{path}-{mode.value}")
    for method, path in (*OURS, *(("post", route) for route in BODIES))
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if mode is GenerationMode.POSITIVE or (method, path) not in ALWAYS_VALID
]


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_responses_match_the_document(
    method: str, path: str, mode: GenerationMode, schema: Any, url: str, request: pytest.FixtureRequest
) -> None:
    """Catches HTTP 500, a response that is not in the document, and an accepted invalid request."""
    operation = schema[path][method]
    assert bool(operation.query or operation.body) == ((method, path) not in ALWAYS_VALID)
    steering_route = (method, path) in OURS
    checks = [*CHECKS, negative_data_rejection] if steering_route else [not_a_server_error]
    count = request.config.getoption("--hostile")

    @settings(
        max_examples=count or EXAMPLES, derandomize=not count, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        case.call_and_validate(base_url=url, checks=checks)

    check()


_WORDS = (
    "post_block", "1", "vector", "scale", "dtype", "shape", "data", "kind", "add", "point", "layers", "tokens", "all",
    "memory", "hooks", "positions", "reduce", "directions", "probes", "filesystem", "tag", "float32", "clamp", "low",
)  # fmt: skip
_TEXTS = st.sampled_from(_WORDS) | st.text(max_size=8)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("route", BODIES)
def test_any_json_in_our_fields(route: str, client: httpx.Client, request: pytest.FixtureRequest) -> None:
    """Catches a JSON value that ends in HTTP 500, or in an error without the name of a field."""
    count = request.config.getoption("--hostile")

    @settings(max_examples=count or EXAMPLES, derandomize=not count, database=None)
    @given(st.dictionaries(st.sampled_from(FIELDS), _VALUES, min_size=1))
    def check(fields: dict[str, Any]) -> None:
        body = json.dumps({"model": MODEL, **BODIES[route][1], **fields})
        response = client.post(route, content=body, headers={"content-type": "application/json"})
        all_null = all(value is None for value in fields.values())
        assert response.status_code == 200 if all_null else response.status_code in (200, 400, 404), response.text
        assert response.status_code == 200 or response.json()["error"]["param"], response.text

    check()


def test_covers_every_documented_operation(document: Any) -> None:
    """Catches a documented steering route that these tests omit."""
    documented = {
        (method, path)
        for path, item in document["paths"].items()
        if path.startswith(("/v1/steering", "/v1/captures"))
        for method in item
    }
    assert documented == set(OURS)
    assert set(BODIES) == {route for route in VALID_BODIES if route in document["paths"]} - {"/invocations"} - {
        "/v1/chat/completions/batch"
    }
