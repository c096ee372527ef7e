# SPDX-License-Identifier: Apache-2.0
"""Limits as a client meets them: statuses, when to come again, and nothing left when it has gone."""

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
from tests.server.auth.guarded import EVERYTHING, client_of, make_guarded_app, refused, start, write_keys
from tests.server.fakes import HIDDEN, LAYERS, MAX_MODEL_LEN, FakeEngine, engine_context, vector
from tests.server.http.answers import captured, done, make_capturing_app
from vllm_steer.frontend.context import REGISTRY_VARIABLE, RegistryOptions
from vllm_steer.params import compile_fields, program_of
from vllm_steer.registry import composer
from vllm_steer.server.auth.keys import hash_secret
from vllm_steer.server.http.middleware import SteeringMiddleware
from vllm_steer.server.http.request_context import RequestContext, set_prompt_len
from vllm_steer.server.http.request_fields import apply_to_params
from vllm_steer.server.quota.tracker import QuotaTracker, quota_tracker_of
from vllm_steer.server.routes.captures import capture_store_of
from vllm_steer.server.settings import registry_limits

ROUTE = "/v1/completions"
MIB = 1 << 20


def adding(value: float) -> dict[str, Any]:
    return {"steering_vectors": {"post_block": {"1": vector(value)}}}


READING: dict[str, Any] = {"capture": {"memory": {"hooks": {"post_block": "all"}, "positions": "all"}}}


class Held:
    """An application whose requests go on until they are told to end, one way or another."""

    def __init__(self, path: Path | None, **flags: object) -> None:
        self.app = FastAPI()
        add_error_handler(self.app)
        self.app.state.args = SimpleNamespace(**flags, **({} if path is None else {"steering_keys": str(path)}))
        self.app.state.engine_client = FakeEngine()
        self.inside = asyncio.Semaphore(0)
        self.go_on = asyncio.Event()

        @self.app.post(ROUTE)
        async def hold(body: Body) -> Any:
            extra = body.model_extra or {}
            set_prompt_len(8)
            apply_to_params(body, SamplingParams(max_tokens=extra.get("max_tokens", 4), n=extra.get("n", 1)))
            self.inside.release()
            if extra.get("stream"):
                return StreamingResponse(self.pieces(extra["stream"]), media_type="text/event-stream")
            await self.go_on.wait()
            if extra.get("fail"):
                raise RuntimeError("the engine has failed")
            return {"choices": [{"index": 0}]}

        self.app.add_middleware(SteeringMiddleware)

    async def pieces(self, kind: str) -> AsyncIterator[str]:
        yield "data: {}\n\n"
        await self.go_on.wait()
        if kind == "fail":
            raise RuntimeError("the engine has failed")
        yield "data: [DONE]\n\n"

    @property
    def in_use(self) -> dict[str, int]:
        return quota_tracker_of(self.app).in_use

    async def begin(self, client: httpx.AsyncClient, **body: Any) -> asyncio.Task[httpx.Response]:
        """A request, when it is inside."""
        task = asyncio.create_task(client.post(ROUTE, json=body))
        inside = asyncio.create_task(self.inside.acquire())
        await asyncio.wait((task, inside), return_when=asyncio.FIRST_COMPLETED, timeout=10)
        assert inside.done(), task.result().text
        return task


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


LIMITS = {"steering_requests": 2, "steering_programs": 1, "capture_mib": 1}


async def two_clients(path: Path, **flags: object) -> tuple[Held, httpx.AsyncClient, httpx.AsyncClient]:
    secrets = write_keys(path, {"one": EVERYTHING, "other": EVERYTHING}, {"one": LIMITS})
    held = Held(path, **flags)
    return held, client_of(held.app, secrets["one"]), client_of(held.app, secrets["other"])


async def test_a_keys_own_limits(path: Path) -> None:
    """Catches a limit that is another key's too, that plain requests do not count against, or that no waiting ends."""
    held, one, other = await two_clients(path)
    tasks = [await held.begin(one, **adding(1.0)), await held.begin(one)]
    error = refused(await one.post(ROUTE, json={}), 429)
    assert "key one is 2" in error["message"] and "--steering-key-requests" in error["message"]
    refused(await one.get("/v1/models"), 429)
    tasks += [await held.begin(other) for _ in range(3)]
    held.go_on.set()
    assert {(await task).status_code for task in tasks} == {200}
    assert (await one.post(ROUTE, json={})).status_code == 200
    assert set(held.in_use.values()) == {0}


async def test_distinct_programs(path: Path) -> None:
    """Catches equal edits that count twice, and reads or modules that count as no program."""
    held, one, other = await two_clients(path, steering_max_programs=2)
    tasks = [await held.begin(one, **adding(1.0))]
    assert "--steering-key-programs" in refused(await one.post(ROUTE, json=adding(2.0)), 429)["message"]
    refused(await one.post(ROUTE, json={**adding(1.0), **READING}), 429)
    tasks += [await held.begin(one, **adding(1.0)), await held.begin(other, **adding(2.0))]
    error = refused(await other.post(ROUTE, json=adding(3.0)), 503)
    assert "--steering-max-programs" in error["message"]
    assert held.in_use["programs"] == 2
    held.go_on.set()
    await asyncio.gather(*tasks)
    assert set(held.in_use.values()) == {0}


async def test_without_keys_only_the_server_counts() -> None:
    """Catches a key's limits that are everybody's where there are no keys."""
    held = Held(None, steering_max_programs=1, steering_key_requests=1, steering_key_programs=1, capture_key_mib=1)
    client = client_of(held.app)
    tasks = [await held.begin(client, **adding(1.0)) for _ in range(3)]
    refused(await client.post(ROUTE, json=adding(2.0)), 503)
    held.go_on.set()
    assert {(await task).status_code for task in tasks} == {200}
    assert set(held.in_use.values()) == {0}


async def test_too_much_for_one_request(path: Path) -> None:
    """Catches a request that is told to come again although it can never pass, or is told that it is malformed."""
    sizes = {"request_edits": 2, "request_layers": 2, "request_vectors": 2, "max_norm": 10}
    held, one, _ = await two_clients(path, **{f"steering_{name}": size for name, size in sizes.items()})
    edit = {"kind": "ablate", "point": "post_block", "layers": [1], "vector": vector()}
    assert refused(await one.post(ROUTE, json={"steering": [edit] * 3}), 413)["param"] == "steering"
    assert (
        "3 layers" in refused(await one.post(ROUTE, json={"steering": [{**edit, "layers": [0, 1, 3]}]}), 413)["message"]
    )
    assert "--steering-max-norm" in refused(await one.post(ROUTE, json=adding(1000.0)), 400)["message"]
    # As many as these for so narrow a model are in no program: their products are formed where rows arrive.
    directions = [[1.0, float(i), *[0.0] * (HIDDEN - 2)] for i in range(HIDDEN)]
    probing = {"capture": {"memory": {"hooks": {"post_block": [1]}, "reduce": {"directions": directions}}}}
    assert f"{HIDDEN} vectors" in refused(await one.post(ROUTE, json=probing), 413)["message"]
    held.go_on.set()
    assert (await one.post(ROUTE, json={"steering": [edit] * 2})).status_code == 200
    assert set(held.in_use.values()) == {0}


async def test_modules_count_as_what_is_in_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a limit that a registered module passes by, and global steering that is on a client's account."""
    options = RegistryOptions(limits=registry_limits(SimpleNamespace(steering_max_norm=10)))
    monkeypatch.setenv(REGISTRY_VARIABLE, msgspec.json.encode(options).decode())  # as the flags do
    secrets = write_keys(path, {"me": EVERYTHING})
    app = await start(make_guarded_app(path, steering_request_edits=2, steering_max_norm=10))
    client = client_of(app, secrets["me"])
    sites = {"post_block": {str(layer): vector(0.1 * layer + 0.1) for layer in range(3)}}
    for name, body in (("large", {"base": sites}), ("small", {"base": {"pre_attn": {"1": vector()}}})):
        assert (await client.post("/v1/steering/modules", json={"name": name, **body})).status_code == 200
    assert "3 edits" in refused(await client.post(ROUTE, json={"steering_modules": ["large"]}), 413)["message"]
    assert (await client.post(ROUTE, json={"steering_modules": ["small"]})).status_code == 200
    over = refused(await client.post(ROUTE, json={"steering_modules": [["small", 4.0]]}), 400)
    assert "--steering-max-norm" in over["message"]
    assert (await client.post("/v1/steering/set", json={"modules": ["large"]})).status_code == 200
    assert (await client.post(ROUTE, json={"steering_modules": ["small"]})).status_code == 200
    assert (await client.post(ROUTE, json={})).json()["steered"] is True
    refused(await client.post("/v1/steering/set", json={"base": {"pre_attn": {"1": vector(100.0)}}}), 400)
    refused(
        await client.post("/v1/steering/modules", json={"name": "x", "base": {"pre_attn": {"1": vector(9.0)}}}), 400
    )
    assert set(quota_tracker_of(app).in_use.values()) == {0}


async def test_modules_are_counted_before_they_are_joined(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a body of a few names that keeps the event loop busy with edits which it may not have."""
    secrets = write_keys(path, {"me": EVERYTHING})
    app = await start(make_guarded_app(path, steering_request_edits=2))
    client = client_of(app, secrets["me"])
    small = {"name": "small", "base": {"pre_attn": {"1": vector()}}}
    assert (await client.post("/v1/steering/modules", json=small)).status_code == 200
    assert (await client.post(ROUTE, json={"steering_modules": ["small"] * 2})).status_code == 200
    monkeypatch.setattr(composer, "join", lambda programs: pytest.fail("joined"))
    three = refused(await client.post(ROUTE, json={"steering_modules": ["small"] * 3}), 413)
    assert "3 edits; at most 2" in three["message"]
    nobody = refused(await client.post(ROUTE, json={"steering_modules": ["small", "nobody"]}), 400)
    assert nobody["param"] == "steering_modules[1]"
    assert set(quota_tracker_of(app).in_use.values()) == {0}


async def test_rows_are_counted_before_they_are_read(path: Path) -> None:
    """Catches captured rows that are counted when it is too late, or of one sample out of many."""
    held, one, _ = await two_clients(path)
    row = 4 * HIDDEN * LAYERS
    tokens = 8 + 4 - 1
    task = await held.begin(one, **READING, n=3)
    assert held.in_use["row_bytes"] == 3 * tokens * row
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert set(held.in_use.values()) == {0}
    fits = MIB // (tokens * row)
    assert "--capture-key-mib" in refused(await one.post(ROUTE, json={**READING, "n": fits + 1}), 413)["message"]
    task = await held.begin(one, **READING, n=fits - 1)
    assert "--capture-key-mib" in refused(await one.post(ROUTE, json={**READING, "n": 2}), 429)["message"]
    held.go_on.set()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert set(held.in_use.values()) == {0}


def test_rows_of_a_prompt_of_unknown_length() -> None:
    """Catches a count by the wrong end: of all generated tokens a long prompt leaves none, of all prompt tokens a short
    one has none."""
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


async def leave(held: Held, secret: str, body: bytes, when: str) -> None:
    """Ask without httpx, and vanish."""
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
    task = asyncio.create_task(held.app(scope, receive, send))
    if when == "cancelled":
        await asyncio.wait_for(held.inside.acquire(), 10)
        assert held.in_use["requests"] == 1
        task.cancel()
    elif when == "while it runs":
        await asyncio.wait_for(held.inside.acquire(), 10)
        ready.set()
        held.go_on.set()
    else:
        held.go_on.set()
    await asyncio.gather(task, return_exceptions=True)
    held.go_on.clear()


@pytest.mark.parametrize("when", ["in the body", "while it runs", "cancelled", "while sending"])
async def test_a_client_that_vanishes_leaves_nothing(when: str, path: Path) -> None:
    """Catches counts that stay when a client goes, until a key is locked out for good."""
    secret = write_keys(path, {"one": EVERYTHING}, {"one": LIMITS})["one"]
    held = Held(path)
    for body in (b'{"steering_vectors": {"post_block": {"1": [1,1,1,1,1,1,1,1]}}}', b"{}"):
        for _ in range(20):
            await leave(held, secret, body, when)
            assert set(held.in_use.values()) == {0}
            held.inside = asyncio.Semaphore(0)


@pytest.mark.parametrize("body", [{"fail": True}, {"stream": "fail"}, {"stream": "well"}, {"steering_modules": ["x"]}])
async def test_however_a_request_ends_nothing_is_left(body: dict[str, Any], path: Path) -> None:
    """Catches counts that only a good answer gives back, or that a stream gives back at its start."""
    secret = write_keys(path, {"one": EVERYTHING}, {"one": LIMITS})["one"]
    held = Held(path)
    transport = httpx.ASGITransport(held.app, raise_app_exceptions=False)
    client = httpx.AsyncClient(
        transport=transport, base_url="http://server", headers={"authorization": f"Bearer {secret}"}
    )
    for _ in range(3):
        if "steering_modules" in body:
            assert (await client.post(ROUTE, json=body)).status_code == 400
        else:
            try:
                task = await held.begin(client, **adding(1.0), **body)
                await asyncio.sleep(0)
                assert (held.in_use["requests"], held.in_use["programs"]) == (1, 1)
                held.go_on.set()
                await task
            except RuntimeError as error:
                assert "failed" in str(error)
        held.go_on.clear()
        assert set(held.in_use.values()) == {0}


async def test_a_key_has_its_part_of_the_store(path: Path) -> None:
    """Catches a key that fills the store for all, or that is refused for what another has stored, or for good."""
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
    whose = bytes.fromhex(hash_secret(secrets["one"]))
    used, expires = capture_store_of(app).usage(whose)
    capture_store_of(app).put(bytes(MIB - used), "json", whose)
    response = await one.post(ROUTE, json=body)
    assert refused(response, 429)["param"] == "capture"
    assert 0 < int(response.headers["retry-after"]) <= 300 and 0 < expires <= 300
    assert (await other.post(ROUTE, json=body)).json()["choices"][0]["capture_results"]["memory"]["status"] == "ok"
    assert (await client_of(app, secrets["one"]).delete(f"/v1/captures/{kept['id']}")).status_code == 204
    assert (await one.post(ROUTE, json=body)).status_code == 200


async def test_one_answer_carries_so_much() -> None:
    """Catches an answer of many choices that is as large as all of them."""
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
    assert QuotaTracker(None).enter(None).store_bytes is None
