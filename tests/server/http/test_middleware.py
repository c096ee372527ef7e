# SPDX-License-Identifier: Apache-2.0
"""The middleware in front of an application that accepts and ignores unknown fields, like vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.sampling_params import SamplingParams

from tests.registry.modules import registry
from tests.server.application import Body, client_of, make_app
from tests.server.fakes import FakeEngine, vector
from vllm_steer.frontend.context import RegistryOptions, ensure_engine_context, set_options
from vllm_steer.log import LimitedLog
from vllm_steer.params import PROGRAM_KEY
from vllm_steer.plugin.request_state import CapacityError
from vllm_steer.registry.directory import DirectoryStore
from vllm_steer.registry.errors import RegistryUnavailableError
from vllm_steer.registry.registry import SteeringRegistry
from vllm_steer.server.http import error_response
from vllm_steer.server.http.apply_fields import apply_to_params
from vllm_steer.server.http.middleware import SteeringMiddleware
from vllm_steer.server.http.request_context import track_sample
from vllm_steer.server.http.request_guard import RETRY_AFTER, STEERABLE_ROUTES

FIELDS = {"steering_vectors": {"post_block": {"1": vector()}}}
ROUTE = "/v1/completions"


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    return error


@pytest.mark.parametrize("route", STEERABLE_ROUTES[:-1])
async def test_accepts_fields_on_steerable_routes(route: str, client: httpx.AsyncClient) -> None:
    """Catches a refusal on a supported route."""
    response = await client.post(route, json=FIELDS)
    assert response.json()["steered"] is True


async def test_passes_requests_without_fields(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Catches a plain request that is refused, or that waits for the engine."""
    for body in ({}, {"prompt": '"steering" is "steering_vectors"'}, {"steering": None}):
        assert (await client.post(ROUTE, json=body)).json() == {"steered": False}
        assert (await client.post("/tokenize", json=body)).status_code == 200
    assert engine.calls == []


async def test_queries_the_engine_once(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Catches an RPC to every worker for every steered request."""
    for _ in range(3):
        await client.post(ROUTE, json=FIELDS)
    assert len(engine.calls) == 1


@pytest.mark.parametrize("name", ["steering_vectors", "steering"])
async def test_refuses_fields_on_other_routes(name: str, engine: FakeEngine) -> None:
    """Catches a route that ignores the fields, or that runs before the refusal."""
    app = make_app(engine)
    error = refusal(await client_of(app).post("/tokenize", json={name: [1]}))
    assert error["param"] == name
    assert "/tokenize" in error["message"]
    assert app.state.tokenized == 0


async def test_refuses_responses_of_routes_that_drop_the_fields(client: httpx.AsyncClient) -> None:
    """Catches fields that pass every check and are then not applied."""
    assert refusal(await client.post("/invocations", json=FIELDS))["param"] == "steering_vectors"
    assert (await client.post("/invocations", json={"a": 1})).json() == {"unsteered": ["a"]}


async def test_refuses_fields_without_enable_steering() -> None:
    """Catches fields ignored by a server that runs without steering."""
    client = client_of(make_app(FakeEngine(steering=False)))
    for route in (ROUTE, "/tokenize"):
        refusal(await client.post(route, json=FIELDS))
    error = refusal(await client.post(ROUTE, json=FIELDS))
    assert "--enable-steering" in error["message"]
    assert (await client.post(ROUTE, json={"steering": None})).json() == {"steered": False}


async def test_refuses_fields_without_an_engine() -> None:
    """Catches HTTP 500 or ignored fields on the render server, which has no engine."""
    refusal(await client_of(make_app(None)).post(ROUTE, json=FIELDS))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"steering_vectors": {"post_block": {"1": [1], "1": [2]}}}', "steering_vectors.post_block"),
        ('{"\\u0073teering": [], "steering": []}', "steering"),
        ('{"extra_body": {"steering": []}}', "extra_body.steering"),
        ('{"steering": ' + "1" * 5000 + "}", "body"),
    ],
)
async def test_refuses_what_json_parsing_hides(body: str, param: str, client: httpx.AsyncClient) -> None:
    """Catches one of two duplicate values silently ignored."""
    response = await client.post(ROUTE, content=body, headers={"content-type": "application/json"})
    assert refusal(response)["param"] == param


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32-be"])
async def test_finds_fields_in_other_encodings(encoding: str, client: httpx.AsyncClient) -> None:
    """Catches fields that JSON parsers see and the byte search does not."""
    body = json.dumps(FIELDS).encode(encoding)
    response = await client.post("/tokenize", content=body, headers={"content-type": "application/json"})
    assert refusal(response)["param"] == "steering_vectors"


def pieces_of(body: bytes, size: int) -> Callable[[], AsyncIterator[bytes]]:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    return pieces


@pytest.mark.parametrize("size", [1, 2, 3, 7, 11])
async def test_finds_fields_across_chunks(size: int, client: httpx.AsyncClient) -> None:
    """Catches a name split between two chunks, and a wrongly assembled body."""
    headers = {"content-type": "application/json"}
    body = json.dumps({"decode_steering_vectors": {"post_block": {"1": vector()}}}).encode()
    response = await client.post("/tokenize", content=pieces_of(body, size)(), headers=headers)
    assert refusal(response)["param"] == "decode_steering_vectors"
    response = await client.post(ROUTE, content=pieces_of(body, size)(), headers=headers)
    assert response.json()["steered"] is True


MEBIBYTE = 1 << 20


@pytest.mark.parametrize("first", [True, False])
async def test_refuses_large_bodies_with_fields(first: bool, client: httpx.AsyncClient) -> None:
    """Catches a limit enforced for only one order of the fields, and a response sent before the client has finished."""
    parts = [("pad", "x" * MEBIBYTE), *FIELDS.items()]
    body = json.dumps(dict(reversed(parts) if first else parts)).encode()
    taken = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal taken
        async for piece in pieces_of(body + b" " * MEBIBYTE, 1 << 16)():
            taken += len(piece)
            yield piece

    response = await client.post(ROUTE, content=pieces(), headers={"content-type": "application/json"})
    assert "--steering-max-body-mib" in refusal(response, 413)["message"]
    assert taken == len(body) + MEBIBYTE


async def test_accepts_large_bodies_without_fields(client: httpx.AsyncClient) -> None:
    """Catches plain requests (with images, say) that are refused or truncated."""
    response = await client.post("/raw", content=b"x" * (3 * MEBIBYTE))
    assert response.json() == {"length": 3 * MEBIBYTE}
    assert (await client.post(ROUTE, json={"prompt": "x" * (3 * MEBIBYTE)})).status_code == 200


async def test_accepts_bodies_up_to_the_limit(client: httpx.AsyncClient) -> None:
    """Catches a limit smaller than configured."""
    body = json.dumps({**FIELDS, "pad": ""})
    body = body[:-2] + "x" * (MEBIBYTE - len(body)) + body[-2:]
    assert len(body) == MEBIBYTE
    response = await client.post(ROUTE, content=body, headers={"content-type": "application/json"})
    assert response.json()["steered"] is True


async def test_refuses_fields_in_uploads(client: httpx.AsyncClient) -> None:
    """Catches fields of an audio upload being ignored, and an upload without fields being refused."""
    upload = {"file": ("a.wav", b"RIFF" * 100_000)}
    response = await client.post("/v1/audio/transcriptions", files=upload, data={"steering_vectors": "{}"})
    assert refusal(response)["param"] == "steering_vectors"
    response = await client.post("/v1/audio/transcriptions", files=upload, data={"prompt": "steering"})
    assert response.json() == {"length": 400_000}


async def post_raw(app: FastAPI, route: str, receive: Callable[[], Awaitable[Any]]) -> list[dict[str, Any]]:
    """Return the ASGI messages of the response, which httpx would merge."""
    app.add_middleware(SteeringMiddleware)
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": route, "headers": headers, "query_string": b""}
    await app(scope, receive, send)
    return sent


async def test_passes_streams_unbuffered(engine: FakeEngine) -> None:
    """Catches a stream that is held back until its end."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()  # as a server does until the client leaves
        return messages.pop()

    sent = await post_raw(make_app(engine), "/stream", receive)
    pieces = [message["body"] for message in sent if message.get("body")]
    assert pieces == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n"]


@pytest.mark.parametrize("steered", [False, True])
async def test_passes_on_the_events_of_plain_requests(steered: bool, engine: FakeEngine) -> None:
    """Catches work for each token of a stream, and a first event of a steered stream that is passed on unchanged."""
    passed: list[bool] = []
    received: list[Any] = []
    body = json.dumps(FIELDS if steered else {}).encode()

    def send(message: Any) -> Awaitable[None]:
        received.append(asyncio.sleep(0))
        return received[-1]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def stream(_scope: Any, receive: Any, send: Any) -> None:
        fields = json.loads((await receive())["body"])
        apply_to_params(Body(**fields), SamplingParams())
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(3):
            sending = send({"type": "http.response.body", "body": b'data: {"a":1}\n\n', "more_body": True})
            passed.append(sending is received[-1])
            await sending

    await ensure_engine_context(engine)
    scope = {
        "type": "http",
        "method": "POST",
        "path": ROUTE,
        "headers": [],
        "query_string": b"",
        "app": make_app(engine),
    }
    await SteeringMiddleware(stream)(scope, receive, send)
    assert passed == [not steered, True, True]
    assert len(received) == 4


async def test_reads_no_body_before_authentication(engine: FakeEngine) -> None:
    """Catches body checks for clients that vLLM's authentication rejects."""
    app = make_app(engine)

    class Authentication:
        def __init__(self, app: Any) -> None:
            pass

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)

    app.add_middleware(Authentication)
    taken = []

    async def receive() -> dict[str, Any]:
        taken.append(1)
        return {"type": "http.request", "body": b"{}", "more_body": False}

    sent = await post_raw(app, ROUTE, receive)
    assert sent[0]["status"] == 401
    assert taken == []


async def test_refusals_keep_response_headers(engine: FakeEngine) -> None:
    """Catches lost CORS headers, without which a browser hides the error."""
    app = make_app(engine)
    app.add_middleware(CORSMiddleware, allow_origins=["http://me"])
    response = await client_of(app).post("/tokenize", json=FIELDS, headers={"origin": "http://me"})
    refusal(response)
    assert response.headers["access-control-allow-origin"] == "http://me"
    assert int(response.headers["content-length"]) == len(response.content)


async def test_supports_middleware_that_reads_the_body(engine: FakeEngine) -> None:
    """Catches HTTP 500 if a user's middleware reads the body before the route."""
    app = make_app(engine)

    class Reader:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            message = await receive()

            async def again() -> Any:
                return message

            await self.app(scope, again, send)

    app.add_middleware(Reader)
    client = client_of(app)
    assert refusal(await client.post("/tokenize", json=FIELDS))["param"] == "steering_vectors"
    assert (await client.post(ROUTE, json=FIELDS)).json()["steered"] is True


@pytest.mark.parametrize("nested", [False, True])
def test_rejects_websocket_events_with_fields(nested: bool, engine: FakeEngine) -> None:
    """Catches a realtime session that ignores steering fields and continues."""
    app = make_app(engine)
    seen: list[str] = []

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        try:
            while True:
                seen.append(await socket.receive_text())
                await socket.send_json({"type": "seen"})
        except WebSocketDisconnect:
            await socket.send_json({"type": "too late"})

    app.add_middleware(SteeringMiddleware)
    plain = {"type": "session.update", "model": "m", "note": "steering", "session": {"capture": True}}
    with TestClient(app).websocket_connect("/v1/realtime") as socket:
        socket.send_json(plain)
        assert socket.receive_json() == {"type": "seen"}
        socket.send_json({**plain, "session": FIELDS} if nested else {**plain, **FIELDS})
        said = socket.receive_json()
        assert said["type"] == "error"
        assert said["error"].startswith("steering_vectors: /v1/realtime does not support this field")
        with pytest.raises(WebSocketDisconnect) as ended:
            socket.receive_json()
    assert ended.value.code == 1008
    assert [json.loads(each) for each in seen] == [plain]


@pytest.mark.parametrize(("root", "path"), [("/behind", f"/behind{ROUTE}"), ("/behind", ROUTE), ("/", ROUTE)])
async def test_ignores_the_root_path(engine: FakeEngine, root: str, path: str) -> None:
    """Catches refusals of all steered requests behind a proxy, and with the root path `/`."""
    client = client_of(make_app(engine, root_path=root))
    assert (await client.post(path, json=FIELDS)).json()["steered"] is True


async def test_a_disconnect_ends_the_request(engine: FakeEngine) -> None:
    """Catches waiting for the rest of a body after the client has disconnected."""
    start: dict[str, Any] = {"type": "http.request", "body": b'{"steer', "more_body": True}
    messages: list[dict[str, Any]] = [{"type": "http.disconnect"}, start]

    async def receive() -> dict[str, Any]:
        return messages.pop()

    await post_raw(make_app(engine), ROUTE, receive)
    assert messages == []


async def test_admission_timeouts_have_retry_after(engine: FakeEngine) -> None:
    """Catches HTTP 503 without Retry-After, and Retry-After on the server's own HTTP 503."""
    app = FastAPI()
    app.state.args = SimpleNamespace(steering_max_body_mib=1)
    app.state.engine_client = engine

    @app.post(ROUTE)
    async def full(body: Body) -> JSONResponse:
        apply_to_params(body, SamplingParams())
        error = create_error_response(CapacityError("waited too long"))
        return JSONResponse(error.model_dump(), status_code=error.error.code)

    client = client_of(app)
    steered = await client.post(ROUTE, json=FIELDS)
    assert steered.status_code == 503
    assert steered.headers["retry-after"] == str(RETRY_AFTER)
    assert "waited too long" in steered.json()["error"]["message"]
    assert "retry-after" not in (await client.post(ROUTE, json={})).headers


@pytest.mark.parametrize("route", [ROUTE, "/v1/messages"])
async def test_admission_timeouts_of_global_steering_have_retry_after(route: str, engine: FakeEngine) -> None:
    """Catches Retry-After missing for requests that are steered or captured only by server-wide settings."""
    app = FastAPI()
    app.state.args = SimpleNamespace(steering_max_body_mib=1)
    app.state.engine_client = engine

    @app.post(route)
    async def full(body: Body) -> JSONResponse:
        extra = {PROGRAM_KEY: b"program"} if body.model_extra else {}
        track_sample(None, SimpleNamespace(sampling_params=SamplingParams(extra_args=extra)))
        error = create_error_response(CapacityError("waited too long"))
        return JSONResponse(error.model_dump(), status_code=error.error.code)

    client = client_of(app)
    assert (await client.post(route, json={"by": "global steering"})).headers["retry-after"] == str(RETRY_AFTER)
    assert "retry-after" not in (await client.post(route, json={})).headers


async def test_an_unreadable_registry_is_http_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches responses without global steering, or HTTP 500, if the registry's folder is gone."""
    engine = FakeEngine()
    await ensure_engine_context(engine)

    def gone(registry: SteeringRegistry) -> None:
        raise RegistryUnavailableError("steering registry", "it is gone")

    monkeypatch.setattr(SteeringRegistry, "is_stale", lambda registry: True)
    monkeypatch.setattr(SteeringRegistry, "snapshot", gone)
    response = await client_of(make_app(engine)).post(ROUTE, json={})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert "it is gone" in response.json()["error"]["message"]


@pytest.mark.parametrize("fields", [{}, {"steering_modules": ["calm"]}])
async def test_damaged_modules_are_http_503(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches HTTP 400, which clients do not retry and alerts do not count, for a damaged registry file.

    The log has the error, but not once for each request.
    """
    counted: list[tuple[int, str]] = []
    monkeypatch.setattr(error_response, "count_refusal", lambda *what: counted.append(what))
    logged: list[str] = []
    log = LimitedLog(SimpleNamespace(error=lambda message, *args, **_: logged.append(message % args)))
    monkeypatch.setattr(error_response, "server_errors", log)
    engine, elsewhere = FakeEngine(), registry(DirectoryStore(tmp_path / "registry"))
    set_options(engine, registry=RegistryOptions(str(tmp_path / "registry")))
    await ensure_engine_context(engine)
    elsewhere.register("calm", base={"post_block": {1: vector()}})
    if not fields:
        elsewhere.set(modules=["calm"])
    for file in (tmp_path / "registry" / "objects").iterdir():
        file.write_bytes(b"")
    response = await client_of(make_app(engine)).post(ROUTE, json=fields)
    assert "damaged" in refusal(response, 503)["message"]
    assert response.headers["retry-after"] == "1"
    assert counted == [(503, "steering registry")]
    await client_of(make_app(engine)).post(ROUTE, json=fields)
    (line,) = logged
    assert line.startswith("HTTP 503: ") and "damaged" in line
