# SPDX-License-Identifier: Apache-2.0
"""Tests of authorization, with and without a key file."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.routing import Route
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocket, WebSocketDisconnect
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.sampling_params import SamplingParams

from tests.server.application import make_app
from tests.server.auth.guarded import EVERYTHING, client_of, make_guarded_app, rejected, start, write_keys
from tests.server.fakes import FakeEngine, vector
from tests.server.requests import INVALID_FIELDS
from vllm_steer.server.auth.authenticator import ADMIN_PATHS, PUBLIC_PATHS, warn_if_unprotected
from vllm_steer.server.auth.current_key import current_key_name, salt_request, use_key
from vllm_steer.server.auth.keys import generate_key
from vllm_steer.server.auth.rights import Right
from vllm_steer.server.http.apply_fields import RequestRefused, apply_to_params
from vllm_steer.server.http.middleware import SteeringMiddleware
from vllm_steer.server.http.request_guard import STEERABLE_ROUTES
from vllm_steer.server.routes.base import SteeringRoute
from vllm_steer.server.routes.captures import capture_store_of

ROUTE = "/v1/completions"
EDIT = {"post_block": {"1": vector()}}
STEERED: dict[str, Any] = {"steering_vectors": EDIT}
CAPTURED: dict[str, Any] = {"capture": {"memory": {"hooks": {"post_block": [1]}}}}
MODULE: dict[str, Any] = {"name": "calm", "base": EDIT, "probes": {"joy": vector(2.0)}}


def keys_of_each_right(path: Path) -> dict[str, str]:
    """Write keys with each right alone, with all, with none, and with all except each one."""
    rights: dict[str, tuple[Right, ...]] = {"all": EVERYTHING, "none": ()}
    for right in Right:
        rights[f"only-{right}"] = (right,)
        rights[f"no-{right}"] = tuple(each for each in Right if each != right)
    return write_keys(path, rights)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def added_routes(app: FastAPI, before: set[int]) -> list[Route]:
    """Return the routes that the startup has added."""
    return [route for route in app.routes if isinstance(route, Route) and id(route) not in before]


def filled(route: Route) -> str:
    return route.path_format.replace("{name}", "calm").replace("{id}", "x" * 43)


async def test_every_steering_route_requires_its_right(path: Path) -> None:
    """Catches a route without a required right, and a declared right that is not enforced."""
    secrets = keys_of_each_right(path)
    app = make_guarded_app(path)
    before = {id(route) for route in app.routes}
    await start(app)
    added = added_routes(app, before)
    assert len(added) >= 10
    for route in added:
        assert isinstance(route, SteeringRoute), f"{route.path} states no right"
        assert (route.openapi_extra or {})["x-steering-right"] in list(Right)
        for method in sorted(route.methods or ()):
            ask = (method, filled(route))
            rejected(await client_of(app).request(*ask), 401)
            for name in ("none", f"no-{route.right}"):
                error = rejected(await client_of(app, secrets[name]).request(*ask), 403)
                assert str(route.right) in error["message"] and name in error["message"]
            for name in ("all", f"only-{route.right}"):
                assert (await client_of(app, secrets[name]).request(*ask)).status_code not in (401, 403), ask


async def test_denies_routes_without_a_right(path: Path) -> None:
    """Catches a route below the steering prefixes that bypasses `SteeringRoute`; control of the test above."""
    secrets = keys_of_each_right(path)
    app = await start(make_guarded_app(path))
    app.add_api_route("/v1/steering/other", lambda: "secret", methods=["GET"])
    assert (
        "no required right" in rejected(await client_of(app, secrets["all"]).get("/v1/steering/other"), 403)["message"]
    )
    assert (await client_of(app, secrets["all"]).get("/v1/steering/missing")).status_code == 404
    with pytest.raises(KeyError):
        SteeringRoute("/v1/steering/other", lambda: "secret")
    free = make_app(FakeEngine())
    free.add_api_route("/v1/steering/other", lambda: "secret", methods=["GET"])
    free.add_middleware(SteeringMiddleware)
    assert (await client_of(free).get("/v1/steering/other")).text == '"secret"'


async def test_fields_require_their_right(path: Path) -> None:
    """Catches a field that reaches the engine without its right, on any route and in any spelling."""
    secrets = keys_of_each_right(path)
    app = await start(make_guarded_app(path))
    modules = {"steering_modules": ["calm"]}
    probes = {"capture": {"memory": {"hooks": {"post_block": [1]}, "reduce": {"probes": ["calm/joy"]}}}}
    await client_of(app, secrets["all"]).post("/v1/steering/modules", json=MODULE)
    for route in STEERABLE_ROUTES[:-1]:
        for body, right in ((STEERED, Right.STEER), (modules, Right.STEER), (probes, Right.CAPTURE)):
            error = rejected(await client_of(app, secrets[f"no-{right}"]).post(route, json=body), 403)
            assert error["param"] == next(iter(body))
            allowed = await client_of(app, secrets[f"only-{right}"]).post(route, json=body)
            assert "403" not in allowed.text and allowed.status_code != 403, allowed.text
    only_steer = client_of(app, secrets["only-steer"])
    rejected(await only_steer.post(ROUTE, json={**STEERED, **CAPTURED}), 403)
    spelled = json.dumps(CAPTURED).replace("capture", "\\u0063apture")
    rejected(await only_steer.post(ROUTE, content=spelled, headers={"content-type": "application/json"}), 403)
    assert (await client_of(app, secrets["none"]).post(ROUTE, json={})).json() == {"steered": False}


async def test_checks_rights_before_values(path: Path) -> None:
    """Catches error messages that reveal valid values to a key without the right."""
    secrets = keys_of_each_right(path)
    app = await start(make_guarded_app(path))
    client = client_of(app, secrets["none"])
    headers = {"content-type": "application/json"}
    for name in ("NaN", "unknown point", "unknown kind", "layer out of range"):
        response = await client.post(ROUTE, content="{" + INVALID_FIELDS[name][0] + "}", headers=headers)
        assert "requires the right 'steer'" in rejected(response, 403)["message"]
    there, not_there = [await client.get(f"/v1/steering/modules/{name}") for name in ("calm", "other")]
    assert there.text == not_there.text


async def test_vectors_require_the_data_right(path: Path) -> None:
    """Catches vectors that the right `read` alone can download."""
    secrets = keys_of_each_right(path)
    app = await start(make_guarded_app(path))
    await client_of(app, secrets["all"]).post("/v1/steering/modules", json=MODULE)
    for where in ("/v1/steering/modules/calm", "/v1/steering/set"):
        reader = client_of(app, secrets["no-data"])
        assert (await reader.get(where)).status_code == 200
        for spelled in ("true", "1", "on", "yes"):
            assert "data" in rejected(await reader.get(where, params={"data": spelled}), 403)["message"]
        assert (await client_of(app, secrets["all"]).get(where, params={"data": "true"})).status_code == 200
        rejected(await client_of(app, secrets["only-data"]).get(where, params={"data": "true"}), 403)


async def test_rejects_urls_as_vectors() -> None:
    """Catches a server that fetches a URL given by a client."""
    app = make_app(FakeEngine())
    app.add_middleware(SteeringMiddleware)
    await start(app)
    for vector_of in ("http://127.0.0.1:1/v", "file:///etc/passwd", {"url": "http://127.0.0.1:1/v"}):
        sites = {"post_block": {"1": vector_of}}
        for where, body in ((ROUTE, {"steering_vectors": sites}), ("/v1/steering/set", {"base": sites}),
                            ("/v1/steering/modules", {"name": "calm", "base": sites})):  # fmt: skip
            assert "post_block[1]" in rejected(await client_of(app).post(where, json=body), 400)["param"]


async def test_global_steering_requires_its_own_right(path: Path) -> None:
    """Catches a tenant with the right `steer` that changes global steering."""
    secrets = keys_of_each_right(path)
    app = await start(make_guarded_app(path))
    rejected(await client_of(app, secrets["only-steer"]).post("/v1/steering/set", json={"base": EDIT}), 403)
    rejected(await client_of(app, secrets["only-steer"]).post("/v1/steering/clear"), 403)
    set_by = await client_of(app, secrets["only-global"]).post("/v1/steering/set", json={"base": EDIT})
    assert set_by.status_code == 200, set_by.text


async def test_paths_require_keys_and_rights(path: Path) -> None:
    """Catches open vLLM routes, closed monitoring routes, and admin routes open to every key."""
    secrets = keys_of_each_right(path)
    app = make_guarded_app(path)
    for where in (*PUBLIC_PATHS, *ADMIN_PATHS, "/sleep", "/v1/models"):
        app.add_api_route(where, lambda: "done", methods=["GET", "POST"])
    await start(app)
    for where in (ROUTE, "/tokenize", "/raw", "/invocations", "/v1/models", "/nowhere", "/sleep", "/openapi.json"):
        error = rejected(await client_of(app).post(where, json={}), 401)
        assert error["param"] == "authorization"
        rejected(await client_of(app, "wrong").post(where, json={}), 401)
    for where in PUBLIC_PATHS:
        assert (await client_of(app).get(where)).text == '"done"'
    none, admin = client_of(app, secrets["none"]), client_of(app, secrets["only-admin"])
    for where in (*ADMIN_PATHS, "/sleep", f"{ADMIN_PATHS[0]}/", "/raw"):
        rejected(await none.post(where, json={}), 403)
    for where in (*ADMIN_PATHS, "/sleep"):
        assert (await admin.post(where, json={})).text == '"done"'
    assert (await none.get("/v1/models")).text == '"done"'
    assert (await client_of(app).get("/v1/steering/set")).headers["www-authenticate"] == "Bearer"
    assert (await client_of(app).options(ROUTE)).status_code == 405  # browsers ask before they send a key


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic {}", "{}", "Bearer  {}", "Bearer {} x"])
async def test_accepts_only_bearer_keys(header: str, path: Path) -> None:
    """Catches other forms of the header that are accepted as a key."""
    secret = write_keys(path, {"me": EVERYTHING})["me"]
    app = make_guarded_app(path)
    client = client_of(app)
    rejected(await client.post(ROUTE, json={}, headers={"authorization": header.format(secret)}), 401)
    assert (await client.post(ROUTE, json={}, headers={"authorization": f"bearer {secret}"})).status_code == 200


def test_websockets_require_a_key(path: Path) -> None:
    """Catches requests that bypass HTTP authentication, such as WebSockets."""
    secret = write_keys(path, {"me": ()})["me"]
    app = make_guarded_app(path)
    names = []

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        names.append(current_key_name())
        await socket.accept()
        await socket.close()

    client = TestClient(app)
    with pytest.raises(WebSocketDenialResponse) as denied, client.websocket_connect("/v1/realtime"):
        pass
    assert denied.value.status_code == 401
    headers = {"authorization": f"Bearer {secret}"}
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime", headers=headers) as socket:
        socket.receive_text()
    assert names == ["me"]


async def test_vllm_keys_have_no_steering_rights(path: Path) -> None:
    """Catches --api-key bypassing rights, keys of the file that vLLM rejects, and locked-out clients."""
    secrets = keys_of_each_right(path)
    app = make_guarded_app(path, api_key=["old", "older"])
    app.user_middleware.insert(1, app.user_middleware[0].__class__(AuthenticationMiddleware, tokens=["old", "older"]))

    @app.post("/v1/seen")
    async def see() -> str | None:
        return current_key_name()

    await start(app)
    for secret in ("old", "older"):
        client = client_of(app, secret)
        assert (await client.post(ROUTE, json={})).json() == {"steered": False}
        rejected(await client.post(ROUTE, json=STEERED), 403)
        rejected(await client.get("/v1/steering/set"), 403)
    assert (await client_of(app, secrets["only-steer"]).post(ROUTE, json=STEERED)).json()["steered"] is True
    assert (await client_of(app, secrets["only-read"]).get("/v1/steering/set")).status_code == 200
    rejected(await client_of(app, "other").post(ROUTE, json={}), 401)
    asked = [await client_of(app, secret).post("/v1/seen", json={}) for secret in ("old", secrets["none"])]
    assert [answer.json() for answer in asked] == ["api-key", "none"]


async def test_captures_are_private_to_their_key(path: Path) -> None:
    """Catches captures that another key can fetch, delete or detect."""
    secrets = write_keys(path, {"alice": [Right.CAPTURE], "bob": [Right.CAPTURE]})
    app = await start(make_guarded_app(path))
    alice, bob = (client_of(app, secret) for secret in secrets.values())
    key = await key_of(app, secrets["alice"])
    handle = capture_store_of(app).put(b"rows", "safetensors", bytes.fromhex(key.sha256))
    for method in ("GET", "DELETE"):
        there = await bob.request(method, f"/v1/captures/{handle}")
        not_there = await bob.request(method, f"/v1/captures/{handle[::-1]}")
        rejected(there, 404)
        assert (there.text, sorted(there.headers)) == (not_there.text, sorted(not_there.headers))
    assert (await alice.get(f"/v1/captures/{handle}")).content == b"rows"
    assert (await alice.delete(f"/v1/captures/{handle}")).status_code == 204
    rejected(await alice.get(f"/v1/captures/{handle}"), 404)


async def key_of(app: FastAPI, secret: str) -> Any:
    found = []

    @app.get("/v1/me")
    async def me() -> None:
        from vllm_steer.server.auth.current_key import current_key

        found.append(current_key())

    await client_of(app, secret).get("/v1/me")
    return found[0]


async def test_current_key_is_set_per_request(path: Path) -> None:
    """Catches a missing key name, and the name of another request."""
    secrets = write_keys(path, {"alice": (), "bob": ()})
    app = make_guarded_app(path)

    @app.post("/v1/who")
    def who() -> str | None:  # in a thread
        return current_key_name()

    for name in ("alice", "bob", "alice"):
        assert (await client_of(app, secrets[name]).post("/v1/who", json={})).json() == name
        assert current_key_name() is None


def engine_request(salt: str | None = None) -> Any:
    return SimpleNamespace(cache_salt=salt)


def salted(key: Any, own: str | None) -> str | None:
    request = engine_request(own)
    with use_key(key):
        salt_request(None, request)
    result: str | None = request.cache_salt
    return result


def test_each_key_has_its_own_salt() -> None:
    """Catches prefix-cache blocks shared between keys or not shared within one, and an ignored salt of a request."""
    (one, _), (other, _) = generate_key("one", (), {}), generate_key("other", (), {})
    made = [salted(key, own) for key in (one, other) for own in (None, "x", "y", salted(one, None), one.cache_salt)]
    assert len(set(made)) == len(made)
    assert made == [salted(key, own) for key in (one, other) for own in (None, "x", "y", made[0], one.cache_salt)]
    assert all(salt is not None and one.cache_salt not in salt and len(salt) <= 128 for salt in made)
    assert salted(None, None) is None and salted(None, "x") == "x"


def test_rejects_background_responses_with_a_key() -> None:
    """Catches unlimited requests of a key: background requests are answered before the model runs."""
    request = ResponsesRequest(model="tiny", input="abc", background=True)
    with use_key(generate_key("me", EVERYTHING, {})[0]):
        with pytest.raises(RequestRefused, match="API keys") as refusal:
            apply_to_params(request, SamplingParams())
        apply_to_params(ResponsesRequest(model="tiny", input="abc"), SamplingParams())
    assert refusal.value.field == "background"
    apply_to_params(request, SamplingParams())


@pytest.mark.parametrize(
    ("args", "warned"),
    [
        ({}, "every client"),
        ({"host": "0.0.0.0"}, "every client"),
        ({"host": "::"}, "every client"),
        ({"host": "my-server"}, "every client"),
        ({"host": "10.0.0.1", "api_key": ["k"]}, "--api-key"),
        ({"host": "127.0.0.1"}, None),
        ({"host": "::1"}, None),
        ({"host": "localhost"}, None),
        ({"host": None, "uds": "/tmp/socket"}, None),
    ],
)
def test_warns_about_unprotected_servers(
    args: dict[str, Any], warned: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a missing warning on a reachable server without keys, and a warning on a local one."""
    logger = logging.getLogger("vllm.vllm_steer.server.auth.authenticator")
    logger.addHandler(caplog.handler)
    try:
        warn_if_unprotected(SimpleNamespace(**args))
    finally:
        logger.removeHandler(caplog.handler)
    assert ("--steering-keys" in caplog.text) == (warned is not None)
    assert warned is None or warned in caplog.text
