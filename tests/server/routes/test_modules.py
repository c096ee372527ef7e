# SPDX-License-Identifier: Apache-2.0
"""``/v1/steering`` without an engine: bodies, responses and OpenAPI document."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from tests.registry.modules import content, module, registry, vector
from vllm_steer.registry.errors import UnknownModuleError
from vllm_steer.registry.module_files import write_module
from vllm_steer.registry.registry import SteeringRegistry
from vllm_steer.request import pack_vector
from vllm_steer.request.scalars import parse_json
from vllm_steer.server.auth.current_key import use_key
from vllm_steer.server.auth.keys import generate_key
from vllm_steer.server.auth.rights import Right
from vllm_steer.server.http.body_checks import BodyChecks
from vllm_steer.server.http.middleware import SteeringMiddleware
from vllm_steer.server.http.schemas import JSON, MODULE_BODY, REQUEST_FIELDS, SET_BODY
from vllm_steer.server.routes import base, modules
from vllm_steer.server.routes.base import STEERING_PREFIX, SteeringRoute
from vllm_steer.server.routes.modules import add_module_routes

MODULES, SET, CLEAR = (f"{STEERING_PREFIX}{name}" for name in ("modules", "set", "clear"))
BASE = {"post_block": {"1": vector(0).tolist()}}
FILE = {"content-type": "application/octet-stream"}


def make_app(steering: SteeringRegistry) -> FastAPI:
    app = FastAPI()
    app.state.args = SimpleNamespace(steering_max_body_mib=1)
    add_module_routes(app, steering)
    app.add_middleware(SteeringMiddleware)
    return app


@pytest.fixture
def steering() -> SteeringRegistry:
    return registry()


@pytest.fixture
async def client(steering: SteeringRegistry) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=make_app(steering))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as made:
        yield made


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == status
    assert error["message"].startswith(f"{error['param']}: ")
    return error


async def test_all_body_forms_register_the_same_module(client: httpx.AsyncClient) -> None:
    """Catches a body form that changes numbers or loses a part."""
    body = json.loads(json.dumps(module().to_wire()))
    body["prefill"]["pre_attn"]["2"]["vector"] = content()["prefill"]["pre_attn"][2].tolist()
    first = await client.post(MODULES, json={"name": "a", "description": "d", "provenance": {"k": "v"}, **body})
    assert first.status_code == 200, first.text
    packed = await client.post(MODULES, json={"name": "b", **module().to_wire()})
    file = await client.post(MODULES, params={"name": "c"}, content=write_module(module()), headers=FILE)
    assert {each.json()["digest"] for each in (first, packed, file)} == {module().digest}
    listed = (await client.get(MODULES)).json()
    assert [(each["name"], each["description"]) for each in listed["data"]] == [("a", "d"), ("b", ""), ("c", "")]
    assert listed["epoch"] == 3


async def test_a_full_queue_refuses_all_but_clear(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches requests that wait without a bound for a slow registry, and steering that such requests keep on."""
    empty = (await client.get(SET)).json()["content"]
    await client.post(SET, json={"base": BASE})
    full = BodyChecks(max_bodies=0, field="registry", full="serves {}")
    monkeypatch.setattr(modules, "registry_calls", lambda: full)
    calls = [client.get(MODULES), client.get(f"{MODULES}/a"), client.delete(f"{MODULES}/a"), client.get(SET),
             client.post(SET, json={"base": BASE}), client.post(MODULES, json={"name": "a", "base": BASE}),
             client.post(MODULES, params={"name": "a"}, content=write_module(module()), headers=FILE)]  # fmt: skip
    for call in calls:
        assert refused(await call, 503)["message"] == "registry: serves 0"
    assert (await client.post(CLEAR)).json()["content"] == empty


async def test_returns_vectors_only_with_data(client: httpx.AsyncClient) -> None:
    """Catches vectors in responses without `data`, and data that cannot be registered again."""
    await client.post(MODULES, json={"name": "a", **module().to_wire()})
    for response in (await client.get(MODULES), await client.get(f"{MODULES}/a")):
        assert pack_vector(vector(0))["data"] not in response.text
    data = (await client.get(f"{MODULES}/a", params={"data": True})).json()["content"]["data"]
    again = await client.post(MODULES, json={"name": "b", **data})
    assert again.json()["digest"] == module().digest
    await client.post(SET, json={"base": BASE})
    assert (await client.get(SET)).json()["content"]["data"] is None
    assert "base" in (await client.get(SET, params={"data": True})).json()["content"]["data"]


async def test_gets_and_deletes_versions(client: httpx.AsyncClient) -> None:
    """Catches references that a URL breaks, and deletion of more than was named."""
    digests = [(await client.post(MODULES, json={"name": "a", "base": base})).json()["digest"]
               for base in (BASE, {"post_block": {"2": vector(1).tolist()}})]  # fmt: skip
    assert (await client.get(f"{MODULES}/a")).json()["digest"] == digests[1]
    assert (await client.get(f"{MODULES}/a@{digests[0]}")).json()["digest"] == digests[0]
    assert (await client.get(f"{MODULES}/{digests[0]}")).json()["name"] == "a"
    assert (await client.delete(f"{MODULES}/a@{digests[1]}")).json()["deleted"] == [digests[1]]
    assert (await client.get(f"{MODULES}/a")).json()["versions"] == [digests[0]]
    assert (await client.delete(f"{MODULES}/a")).status_code == 200
    for response in (await client.get(f"{MODULES}/a"), await client.delete(f"{MODULES}/a")):
        assert "unknown module 'a'" in refused(response, 404)["message"]


async def test_sets_and_clears_global_steering(client: httpx.AsyncClient) -> None:
    """Catches a wrong change, and an epoch that does not count it."""
    empty = (await client.get(SET)).json()
    await client.post(MODULES, json={"name": "a", "base": BASE})
    first = (await client.post(SET, json={"modules": [["a", 2]], "base": BASE})).json()
    assert (first["epoch"], first["modules"][0]["scale"]) == (2, 2.0)
    second = (await client.post(SET, json={"decode": {"pre_attn": {"3": vector(1).tolist()}}})).json()
    assert second["content"]["tiers"] == {"base": {"post_block": [1]}, "decode": {"pre_attn": [3]}}
    assert second["modules"] == first["modules"]
    third = (await client.post(SET, json={"prefill": BASE, "replace": True})).json()
    assert (third["modules"], third["content"]["tiers"]) == ([], {"prefill": {"post_block": [1]}})
    cleared = (await client.post(CLEAR)).json()
    assert {**cleared, "epoch": 0} == {**empty, "epoch": 0}
    assert cleared["epoch"] == 5
    for body in (b'{"base": 1}', b"[]", b"x", b" " * (1 << 20) + b"{} "):
        response = await client.post(CLEAR, content=body)
        assert response.status_code in (400, 413), body
        assert response.json()["error"]["param"] in ("base", "body")
    assert (await client.post(CLEAR, content=b"{}")).status_code == 200
    assert len({each["digest"] for each in (empty, first, second, third)}) == 4


@pytest.mark.parametrize(("rights", "listed"), [((Right.GLOBAL,), False), ((Right.GLOBAL, Right.READ), True)])
def test_set_lists_modules_for_keys_that_may_list_them(rights: tuple[Right, ...], listed: bool) -> None:
    """Catches an error that lists the modules for a key that may not list them."""
    modules_of_server = registry()
    modules_of_server.register("secret", base=BASE)
    with use_key(generate_key("key", rights, {})[0]), pytest.raises(UnknownModuleError) as caught:
        modules._set_json(modules_of_server, b'{"modules": ["public"]}')
    names = "; registered modules: secret" if listed else ""
    assert str(caught.value) == f"modules[0]: unknown module 'public'{names}"


async def test_parses_bodies_in_a_thread(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a large body that blocks the event loop."""
    threads: list[int] = []

    def parse(text: str | bytes, field: str) -> Any:
        threads.append(threading.get_ident())
        return parse_json(text, field)

    monkeypatch.setattr(base, "parse_json", parse)
    for path, body in ((MODULES, {"name": "a", "base": BASE}), (SET, {"base": BASE}), (CLEAR, {})):
        assert (await client.post(path, json=body)).status_code == 200
    assert len(threads) == 3
    assert threading.get_ident() not in threads


WRONG: dict[str, tuple[str, str, str, str]] = {
    "no JSON": (MODULES, "{", "body", "JSON"),
    "no object": (MODULES, "[1]", "body", "object"),
    "no name": (MODULES, '{"base": {"post_block": {"1": VECTOR}}}', "name", 'add "name" to the body'),
    "path in name": (MODULES, '{"name": "../a", "base": {"post_block": {"1": VECTOR}}}', "name", "ASCII"),
    "look-alike": (MODULES, '{"name": "c\\u0430lm", "base": {"post_block": {"1": VECTOR}}}', "name", "ASCII"),
    "nothing in it": (MODULES, '{"name": "a"}', "module", "empty"),
    "vector file as JSON": (MODULES, '{"hookName": "x", "values": [1]}', "hookName", "as application/octet-stream"),
    "unknown field": (MODULES, '{"name": "a", "steering_vectors": {}}', "steering_vectors", "base, prefill"),
    "key twice": (MODULES, '{"name": "a", "name": "b"}', "body", "duplicate key"),
    "layer twice": (MODULES, '{"name": "a", "base": {"post_block": {"1": [1], "1": [2]}}}', "body", "duplicate key"),
    "NaN": (MODULES, '{"name": "a", "base": {"post_block": {"1": [NaN, 1]}}}',
            "base.post_block[1][0]", "finite"),
    "huge integer": (MODULES, '{"name": "a", "base": {"post_block": {"1": [%s]}}}' % ("9" * 5000), "body", "digits"),
    "deep": (MODULES, '{"name": ' + "[" * 100000, "body", "JSON"),
    "width": (MODULES, '{"name": "a", "base": {"post_block": {"1": [1, 2]}}}', "base.post_block[1]",
              "hidden size is 8"),
    "layer": (MODULES, '{"name": "a", "base": {"post_block": {"4": VECTOR}}}', "base.post_block[4]", "layers 0 to 3"),
    "refused site": (MODULES, '{"name": "a", "base": {"post_attn": {"2": VECTOR}}}', "base.post_attn[2]", "parallel"),
    "set nothing": (SET, "{}", "set", "is empty"),
    "set no modules": (SET, '{"modules": []}', "modules", "is empty, and set keeps the fields that are not given"),
    "set no edits": (SET, '{"edits": []}', "edits", "set the others with replace=True, or use clear"),
    "set unknown": (SET, '{"modules": ["x"]}', "modules[0]", "unknown module 'x'; registered modules: none; register"),
    "set probes": (SET, '{"probes": {}}', "probes", "base, prefill"),
    "set replace": (SET, '{"replace": 1}', "replace", "true or false"),
    "set too far back": (SET, '{"edits": [{"kind": "add", "point": "post_block", "layers": 1, "vector": VECTOR, '
                         '"tokens": [-2]}]}', "edits[0]", "every prompt"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
async def test_refuses_wrong_bodies(case: str, client: httpx.AsyncClient, steering: SteeringRegistry) -> None:
    """Catches wrong content applied in part, and errors that do not name the field."""
    route, body, param, words = WRONG[case]
    body = body.replace("VECTOR", json.dumps(vector(0).tolist()))
    response = await client.post(route, content=body, headers={"content-type": "application/json"})
    error = refused(response, 404 if "unknown" in case and route == SET else 400)
    assert error["param"].startswith(param)
    assert words in error["message"]
    assert steering.snapshot().epoch == 0


async def test_refuses_wrong_uploads(client: httpx.AsyncClient) -> None:
    """Catches a body parsed as another media type, and bodies without a size limit."""
    data = write_module(module())
    assert refused(await client.post(MODULES, content=data, headers=FILE))["param"] == "name"
    assert refused(await client.post(MODULES, params={"name": "a"}, content=data[:-1], headers=FILE))["param"] == "file"
    assert (
        "JSON"
        in refused(await client.post(MODULES, content=data, headers={"content-type": "application/json"}))["message"]
    )
    for kind in ("application/x-www-form-urlencoded", "multipart/form-data", ""):
        refused(await client.post(MODULES, content=data, headers={"content-type": kind}), 415)
    large = {"name": "a", "description": "x" * (1 << 20)}
    assert "--steering-max-body-mib" in refused(await client.post(MODULES, json=large), 413)["message"]
    assert refused(await client.post(MODULES, params={"name": "b"}, json={"name": "a"}))["param"] == "name"


async def test_a_full_registry_is_http_507(client: httpx.AsyncClient) -> None:
    """Catches a full registry reported as a malformed request."""
    full = httpx.ASGITransport(app=make_app(registry(modules=0)))
    async with httpx.AsyncClient(transport=full, base_url="http://server") as other:
        refused(await other.post(MODULES, json={"name": "a", "base": BASE}), 507)


def our_routes(app: FastAPI) -> list[Route]:
    return [route for route in app.routes if isinstance(route, Route) and route.path.startswith(STEERING_PREFIX)]


async def test_every_route_declares_a_right_and_is_documented(client: httpx.AsyncClient) -> None:
    """Catches a route without permission check or error handling, and undocumented routes."""
    app = make_app(registry())
    rights = {(route.path.removeprefix(STEERING_PREFIX), *sorted(route.methods or ())): route.right
              for route in our_routes(app) if isinstance(route, SteeringRoute)}  # fmt: skip
    assert len(rights) == len(our_routes(app))
    assert rights == {
        ("modules", "POST"): Right.REGISTER,
        ("modules", "GET"): Right.READ,
        ("modules/{name}", "GET"): Right.READ,
        ("modules/{name}", "DELETE"): Right.REGISTER,
        ("set", "POST"): Right.GLOBAL,
        ("set", "GET"): Right.READ,
        ("clear", "POST"): Right.GLOBAL,
    }
    document = (await client.get("/openapi.json")).json()
    assert undescribed(document) == []
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert all(operation["summary"] and operation["description"] for operation in operations)
    assert len(operations) == len(rights)


def undescribed(document: dict[str, Any]) -> list[str]:
    """Return properties without a description in the schemas of responses and bodies."""
    found = []
    schemas = {name: schema for name, schema in document["components"]["schemas"].items() if "Validation" not in name}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for kind, body in operation.get("requestBody", {}).get("content", {}).items():
                schemas[f"{method} {path} {kind}"] = body["schema"]
    for name, schema in schemas.items():
        for key, value in schema.get("properties", {}).items():
            if not value.get("description"):
                found.append(f"{name}.{key}")
    return found


def conforms(body: Any, schema: dict[str, Any]) -> bool:
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(json.dumps(body)))


def test_schemas_match_the_parsers() -> None:
    """Catches schemas that reject valid bodies or accept everything."""
    of_module, of_set = (body["content"][JSON]["schema"] for body in (MODULE_BODY, SET_BODY))
    whole = module().to_wire()
    assert conforms({"name": "a", **whole, "provenance": {"k": "v"}, "model": None}, of_module)
    assert conforms(
        {**{key: whole[key] for key in ("base", "edits")}, "modules": [["a", 2], "b"], "replace": True}, of_set
    )
    assert conforms({"post_block": {"1": vector(0).tolist()}}, REQUEST_FIELDS["steering_vectors"])
    assert conforms(["a", ["b", 0.5]], REQUEST_FIELDS["steering_modules"])
    spec = {"hooks": {"post_block": [1]}, "reduce": {"probes": ["a/b"]}}
    assert conforms({"memory": spec}, REQUEST_FIELDS["capture"])
    named = {"name": "a"}
    for wrong in (
        whole,
        {"name": 1},
        {**named, "x": 1},
        {**named, "base": [{"1": [1]}]},
        {**named, "base": {"pre_attn": {"-1": [1]}}},
        {**named, "edits": [{"point": "pre_attn"}]},
    ):
        assert not conforms(wrong, of_module)
    assert not conforms([], REQUEST_FIELDS["steering_modules"])
