# SPDX-License-Identifier: Apache-2.0
"""Tests of limits over HTTP: statuses, Retry-After, and release of all resources."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from vllm.sampling_params import SamplingParams

from tests.server.application import Body, add_error_handler
from tests.server.auth.guarded import EVERYTHING, client_of, make_guarded_app, rejected, start, write_keys
from tests.server.fakes import HIDDEN, LAYERS, MAX_MODEL_LEN, FakeEngine, engine_context, vector
from tests.server.http.answers import captured, done, make_capturing_app
from vllm_steer.frontend.context import RegistryOptions
from vllm_steer.params import compile_fields, program_of
from vllm_steer.registry import composer
from vllm_steer.server.auth.keys import hash_secret
from vllm_steer.server.http.apply_fields import apply_to_params
from vllm_steer.server.http.middleware import SteeringMiddleware
from vllm_steer.server.http.request_context import RequestContext, set_prompt_len
from vllm_steer.server.quota.tracker import QuotaTracker, quota_tracker_of
from vllm_steer.server.routes.captures import capture_store_of
from vllm_steer.server.settings import registry_limits
from vllm_steer.settings import REGISTRY_VARIABLE

ROUTE = "/v1/completions"
MIB = 1 << 20


def adding(value: float) -> dict[str, Any]:
    return {"steering_vectors": {"post_block": {"1": vector(value)}}}


READING: dict[str, Any] = {"capture": {"memory": {"hooks": {"post_block": "all"}, "positions": "all"}}}


class BlockingApp:
    """Application owner requests run until the test ends them."""

    def __init__(self, path: Path | None, **flags: object) -> None:
        self.app = FastAPI()
        add_error_handler(self.app)
        self.app.state.args = SimpleNamespace(**flags, **({} if path is None else {"steering_keys": str(path)}))
        self.app.state.engine_client = FakeEngine()
        self.inside = asyncio.Semaphore(0)
        self.finish = asyncio.Event()

        @self.app.post(ROUTE)
        async def hold(body: Body) -> Any:
            extra = body.model_extra or {}
            set_prompt_len(8)
            apply_to_params(body, SamplingParams(max_tokens=extra.get("max_tokens", 4), n=extra.get("n", 1)))
            self.inside.release()
            if extra.get("stream"):
                return StreamingResponse(self.pieces(extra["stream"]), media_type="text/event-stream")
            await self.finish.wait()
            if extra.get("fail"):
                raise RuntimeError("the engine has failed")
            return {"choices": [{"index": 0}]}

        self.app.add_middleware(SteeringMiddleware)

    async def pieces(self, kind: str) -> AsyncIterator[str]:
        yield "data: {}\n\n"
        await self.finish.wait()
        if kind == "fail":
            raise RuntimeError("the engine has failed")
        yield "data: [DONE]\n\n"

    @property
    def in_use(self) -> dict[str, int]:
        return quota_tracker_of(self.app).in_use

    async def begin(self, client: httpx.AsyncClient, **body: Any) -> asyncio.Task[httpx.Response]:
        """Start a request and return its task once the handler runs."""
        task = asyncio.create_task(client.post(ROUTE, json=body))
        inside = asyncio.create_task(self.inside.acquire())
        await asyncio.wait((task, inside), return_when=asyncio.FIRST_COMPLETED, timeout=10)
        assert inside.done(), task.result().text
        return task


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


LIMITS = {"steering_requests": 2, "steering_programs": 1, "capture_mib": 1}


async def two_clients(path: Path, **flags: object) -> tuple[BlockingApp, httpx.AsyncClient, httpx.AsyncClient]:
    secrets = write_keys(path, {"one": EVERYTHING, "other": EVERYTHING}, {"one": LIMITS})
    server = BlockingApp(path, **flags)
    return server, client_of(server.app, secrets["one"]), client_of(server.app, secrets["other"])


async def test_key_limits(path: Path) -> None:
    """Catches a limit shared between keys, plain requests that do not count, and a limit that is never released."""
    server, one, other = await two_clients(path)
    tasks = [await server.begin(one, **adding(1.0)), await server.begin(one)]
    error = rejected(await one.post(ROUTE, json={}), 429)
    assert "key one is 2" in error["message"] and "own limit steering_requests" in error["message"]
    rejected(await one.get("/v1/models"), 429)
    tasks += [await server.begin(other) for _ in range(3)]
    server.finish.set()
    assert {(await task).status_code for task in tasks} == {200}
    assert (await one.post(ROUTE, json={})).status_code == 200
    assert set(server.in_use.values()) == {0}


async def test_distinct_program_limits(path: Path) -> None:
    """Catches equal edits counted twice, and reads or modules that do not count as programs."""
    server, one, other = await two_clients(path, steering_max_programs=2)
    tasks = [await server.begin(one, **adding(1.0))]
    assert "own limit steering_programs" in rejected(await one.post(ROUTE, json=adding(2.0)), 429)["message"]
    rejected(await one.post(ROUTE, json={**adding(1.0), **READING}), 429)
    tasks += [await server.begin(one, **adding(1.0)), await server.begin(other, **adding(2.0))]
    error = rejected(await other.post(ROUTE, json=adding(3.0)), 503)
    assert "--steering-max-programs" in error["message"]
    assert server.in_use["programs"] == 2
    server.finish.set()
    await asyncio.gather(*tasks)
    assert set(server.in_use.values()) == {0}


async def test_key_limits_do_not_apply_without_keys() -> None:
    """Catches limits of keys on a server without keys."""
    server = BlockingApp(
        None, steering_max_programs=1, steering_key_requests=1, steering_key_programs=1, capture_key_mib=1
    )
    client = client_of(server.app)
    tasks = [await server.begin(client, **adding(1.0)) for _ in range(3)]
    rejected(await client.post(ROUTE, json=adding(2.0)), 503)
    server.finish.set()
    assert {(await task).status_code for task in tasks} == {200}
    assert set(server.in_use.values()) == {0}


async def test_limits_per_request(path: Path) -> None:
    """Catches a 429 for a request that can never succeed, and an oversized request reported as malformed."""
    sizes = {"request_edits": 2, "request_layers": 2, "request_vectors": 2, "max_norm": 10}
    server, one, _ = await two_clients(path, **{f"steering_{name}": size for name, size in sizes.items()})
    edit = {"kind": "ablate", "point": "post_block", "layers": [1], "vector": vector()}
    assert rejected(await one.post(ROUTE, json={"steering": [edit] * 3}), 413)["param"] == "steering"
    assert (
        "3 layers"
        in rejected(await one.post(ROUTE, json={"steering": [{**edit, "layers": [0, 1, 3]}]}), 413)["message"]
    )
    assert "--steering-max-norm" in rejected(await one.post(ROUTE, json=adding(1000.0)), 400)["message"]
    # With as many directions as the hidden size, the front end computes the products, not the engine.
    directions = [[1.0, float(i), *[0.0] * (HIDDEN - 2)] for i in range(HIDDEN)]
    probing = {"capture": {"memory": {"hooks": {"post_block": [1]}, "reduce": {"directions": directions}}}}
    assert f"{HIDDEN} vectors" in rejected(await one.post(ROUTE, json=probing), 413)["message"]
    server.finish.set()
    assert (await one.post(ROUTE, json={"steering": [edit] * 2})).status_code == 200
    assert set(server.in_use.values()) == {0}


async def test_modules_count_towards_request_limits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches registered modules that bypass limits, and global steering that counts for a client."""
    options = RegistryOptions(limits=registry_limits(SimpleNamespace(steering_max_norm=10)))
    monkeypatch.setenv(REGISTRY_VARIABLE, msgspec.json.encode(options).decode())  # as the flags do
    secrets = write_keys(path, {"me": EVERYTHING})
    app = await start(make_guarded_app(path, steering_request_edits=2, steering_max_norm=10))
    client = client_of(app, secrets["me"])
    sites = {"post_block": {str(layer): vector(0.1 * layer + 0.1) for layer in range(3)}}
    small = {"base": {"pre_attn": {"1": vector()}}, "provenance": {"stream": '{"1": 20}'}}
    for name, body in (("large", {"base": sites}), ("small", small)):
        assert (await client.post("/v1/steering/modules", json={"name": name, **body})).status_code == 200
    assert "3 edits" in rejected(await client.post(ROUTE, json={"steering_modules": ["large"]}), 413)["message"]
    assert (await client.post(ROUTE, json={"steering_modules": ["small"]})).status_code == 200
    over = rejected(await client.post(ROUTE, json={"steering_modules": [["small", 4.0]]}), 400)
    norm = 4 * HIDDEN**0.5
    assert f"a norm of {norm:.6g}, a dose of {norm / 20:.3g}; this server allows 10, a dose of 0.5" in over["message"]
    small["provenance"]["stream"] = '{"1": 10}'
    assert (await client.post("/v1/steering/modules", json={"name": "again", **small})).status_code == 200
    over = rejected(await client.post(ROUTE, json={"steering_modules": [{"module": "small", "dose": 1}]}), 400)
    assert "a norm of 20, a dose of 1 to 2; this server allows 10, a dose of 0.5 to 1 (--" in over["message"]
    assert (await client.post("/v1/steering/set", json={"modules": ["large"]})).status_code == 200
    assert (await client.post(ROUTE, json={"steering_modules": ["small"]})).status_code == 200
    assert (await client.post(ROUTE, json={})).json()["steered"] is True
    rejected(await client.post("/v1/steering/set", json={"base": {"pre_attn": {"1": vector(100.0)}}}), 400)
    rejected(
        await client.post("/v1/steering/modules", json={"name": "x", "base": {"pre_attn": {"1": vector(9.0)}}}), 400
    )
    assert set(quota_tracker_of(app).in_use.values()) == {0}


async def test_modules_are_counted_before_joining(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a small body that keeps the event loop busy joining edits beyond the limit."""
    secrets = write_keys(path, {"me": EVERYTHING})
    app = await start(make_guarded_app(path, steering_request_edits=2))
    client = client_of(app, secrets["me"])
    small = {"name": "small", "base": {"pre_attn": {"1": vector()}}}
    assert (await client.post("/v1/steering/modules", json=small)).status_code == 200
    assert (await client.post(ROUTE, json={"steering_modules": ["small"] * 2})).status_code == 200
    monkeypatch.setattr(composer, "join", lambda programs: pytest.fail("joined"))
    three = rejected(await client.post(ROUTE, json={"steering_modules": ["small"] * 3}), 413)
    assert "3 edits; at most 2" in three["message"]
    unknown = rejected(await client.post(ROUTE, json={"steering_modules": ["small", "missing"]}), 400)
    assert unknown["param"] == "steering_modules[1]"
    assert set(quota_tracker_of(app).in_use.values()) == {0}


async def test_rows_are_reserved_before_capture(path: Path) -> None:
    """Catches rows that are counted too late, or for one sample only."""
    server, one, _ = await two_clients(path)
    row = 4 * HIDDEN * LAYERS
    tokens = 8 + 4 - 1
    task = await server.begin(one, **READING, n=3)
    assert server.in_use["row_bytes"] == 3 * tokens * row
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert set(server.in_use.values()) == {0}
    fits = MIB // (tokens * row)
    assert "own limit capture_mib" in rejected(await one.post(ROUTE, json={**READING, "n": fits + 1}), 413)["message"]
    task = await server.begin(one, **READING, n=fits - 1)
    assert "own limit capture_mib" in rejected(await one.post(ROUTE, json={**READING, "n": 2}), 429)["message"]
    server.finish.set()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert set(server.in_use.values()) == {0}


def test_row_bound_for_unknown_prompt_length() -> None:
    """Catches a bound computed for the shortest or the longest prompt only."""
    capabilities = engine_context().capabilities
    for positions in ("all_prompt", "all_generated", "all"):
        fields = {"capture": {"memory": {"hooks": {"post_block": [1]}, "positions": positions}}}
        params = SamplingParams(max_tokens=MAX_MODEL_LEN)
        params.extra_args = dict(compile_fields(fields))
        program = program_of(params)
        assert program is not None
        most = max(capabilities.most_row_bytes(program, length, MAX_MODEL_LEN) for length in range(1, MAX_MODEL_LEN))
        assert capabilities.most_row_bytes(program, None, MAX_MODEL_LEN) == most
        assert capabilities.most_row_bytes(program, 8, None) == capabilities.most_row_bytes(program, 8, MAX_MODEL_LEN)


async def disconnect(server: BlockingApp, secret: str, body: bytes, when: str) -> None:
    """Send a request without httpx and disconnect."""
    ready = asyncio.Event()
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": when == "in the body"}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        if when != "in the body":
            await ready.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if when == "while sending":
            raise OSError("the connection is gone")

    headers = [(b"content-type", b"application/json"), (b"authorization", f"Bearer {secret}".encode())]
    scope = {"type": "http", "method": "POST", "path": ROUTE, "headers": headers, "query_string": b""}
    task = asyncio.create_task(server.app(scope, receive, send))
    if when == "cancelled":
        await asyncio.wait_for(server.inside.acquire(), 10)
        assert server.in_use["requests"] == 1
        task.cancel()
    elif when == "while it runs":
        await asyncio.wait_for(server.inside.acquire(), 10)
        ready.set()
        server.finish.set()
    else:
        server.finish.set()
    await asyncio.gather(task, return_exceptions=True)
    server.finish.clear()


@pytest.mark.parametrize("when", ["in the body", "while it runs", "cancelled", "while sending"])
async def test_disconnect_releases_everything(when: str, path: Path) -> None:
    """Catches reservations that leak on disconnect and finally lock the key out."""
    secret = write_keys(path, {"one": EVERYTHING}, {"one": LIMITS})["one"]
    server = BlockingApp(path)
    for body in (b'{"steering_vectors": {"post_block": {"1": [1,1,1,1,1,1,1,1]}}}', b"{}"):
        for _ in range(20):
            await disconnect(server, secret, body, when)
            assert set(server.in_use.values()) == {0}
            server.inside = asyncio.Semaphore(0)


@pytest.mark.parametrize("body", [{"fail": True}, {"stream": "fail"}, {"stream": "well"}, {"steering_modules": ["x"]}])
async def test_every_ending_releases_everything(body: dict[str, Any], path: Path) -> None:
    """Catches reservations released only on success, and streams that release at their start."""
    secret = write_keys(path, {"one": EVERYTHING}, {"one": LIMITS})["one"]
    server = BlockingApp(path)
    transport = httpx.ASGITransport(server.app, raise_app_exceptions=False)
    client = httpx.AsyncClient(
        transport=transport, base_url="http://server", headers={"authorization": f"Bearer {secret}"}
    )
    for _ in range(3):
        if "steering_modules" in body:
            assert (await client.post(ROUTE, json=body)).status_code == 400
        else:
            try:
                task = await server.begin(client, **adding(1.0), **body)
                await asyncio.sleep(0)
                assert (server.in_use["requests"], server.in_use["programs"]) == (1, 1)
                server.finish.set()
                await task
            except RuntimeError as error:
                assert "failed" in str(error)
        server.finish.clear()
        assert set(server.in_use.values()) == {0}


async def test_key_limit_of_stored_captures(path: Path) -> None:
    """Catches a key that fills the store for all, and one rejected because of others or permanently."""
    secrets = write_keys(path, {"one": EVERYTHING, "other": EVERYTHING}, {"one": {"capture_store_mib": 1}})
    app = make_capturing_app([{"memory": done(captured(rows=MIB // (4 * HIDDEN)))}], capture_inline_kib=1)
    app.state.args.steering_keys = str(path)
    one, other = (client_of(app, secret) for secret in secrets.values())
    body = {"capture": {"memory": {"hooks": {"post_block": [1]}, "positions": "all"}}}
    answer = await one.post(ROUTE, json=body)
    report = answer.json()["choices"][0]["capture_results"]["memory"]
    assert "--capture-key-store-mib" in report["error"]  # a file is larger than its rows
    small = make_capturing_app([{"memory": done(captured(rows=MIB // (8 * HIDDEN)))}], capture_inline_kib=1)
    small.state.args = app.state.args
    small.state.vllm_steer_captures = capture_store_of(app)
    one, other = (client_of(small, secret) for secret in secrets.values())
    kept = (await one.post(ROUTE, json=body)).json()["choices"][0]["capture_results"]["memory"]
    assert kept["status"] == "ok", kept
    again = (await one.post(ROUTE, json=body)).json()["choices"][0]["capture_results"]["memory"]
    assert "no room for" in again["error"]
    owner = bytes.fromhex(hash_secret(secrets["one"]))
    used, expires = capture_store_of(app).usage(owner)
    capture_store_of(app).put(bytes(MIB - used), "json", owner)
    response = await one.post(ROUTE, json=body)
    assert rejected(response, 429)["param"] == "capture"
    assert 0 < int(response.headers["retry-after"]) <= 300 and 0 < expires <= 300
    assert (await other.post(ROUTE, json=body)).json()["choices"][0]["capture_results"]["memory"]["status"] == "ok"
    assert (await client_of(app, secrets["one"]).delete(f"/v1/captures/{kept['id']}")).status_code == 204
    assert (await one.post(ROUTE, json=body)).status_code == 200


async def test_response_size_limit() -> None:
    """Catches a response with many choices that exceeds the limit of one response."""
    rows = MIB // 2 // (4 * HIDDEN)
    results = [{"memory": done(captured(rows=rows, value=float(i)))} for i in range(4)]
    app = make_capturing_app(results, capture_response_mib=1)
    body = {"capture": {"memory": {"hooks": {"post_block": [1]}, "positions": "all"}}}
    choices = (await client_of(app).post(ROUTE, json=body)).json()["choices"]
    reports = [choice["capture_results"]["memory"] for choice in choices]
    assert sum("sites" in report for report in reports) == 2
    assert sum("id" in report for report in reports) == 2


def test_a_context_without_quotas_has_no_reservation() -> None:
    """Catches a batch run, which has no books, that fails for want of them."""
    assert RequestContext().reservation is None
    assert QuotaTracker(None).reserve(None).store_bytes is None
