# SPDX-License-Identifier: Apache-2.0
"""Tests of the audit log: every change is recorded once, with its actor."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.docs.markdown import tables
from tests.registry.modules import content, module, registry, vector
from tests.repo.tree import read
from vllm_steer import audit
from vllm_steer.frontend.live import LiveSample
from vllm_steer.registry.module_files import write_module
from vllm_steer.registry.registry import SteeringRegistry
from vllm_steer.request import pack_vector
from vllm_steer.server.auth.current_key import use_key
from vllm_steer.server.auth.key_file import edit_keys
from vllm_steer.server.auth.key_file_watcher import KeyFileWatcher
from vllm_steer.server.auth.keys import Key, generate_key
from vllm_steer.server.auth.rights import Right
from vllm_steer.server.http.running_requests import RunningRequest, RunningRequests
from vllm_steer.server.routes import live
from vllm_steer.server.routes.modules import add_module_routes, make_router

BASE = {"post_block": {"1": pack_vector(vector(0))}}
OTHER = {"post_block": {"1": pack_vector(vector(1))}}
FILE = {"content-type": "application/octet-stream"}
MODULES, SET, CLEAR = (f"/v1/steering/{name}" for name in ("modules", "set", "clear"))

CHANGES: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("POST", "/v1/steering/modules"): [
        {"json": {"name": "calm", "base": BASE}},
        {"content": write_module(module()), "headers": FILE, "params": {"name": "calm"}},
    ],
    ("DELETE", "/v1/steering/modules/{name}"): [{}],
    ("POST", "/v1/steering/set"): [{"json": {"base": BASE}}, {"json": {"base": OTHER, "replace": True}}],
    ("POST", "/v1/steering/clear"): [{}],
}
"""Valid bodies for every route that changes state."""


class ConfirmingEngine:
    """Engine with one running sample, which confirms every change of its live strength."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1),
            model_config=SimpleNamespace(served_model_name="tiny"),
        )
        sample = SimpleNamespace(live_names=("calm",), live_id="live id", live_strengths={}, readouts=None)
        state = SimpleNamespace(request_id="sample", _steering_sample=sample)
        self.output_processor = SimpleNamespace(request_states={"sample": state})

    async def collective_rpc(self, method: str, args: Any) -> list[list[int]]:
        return [[7]]


async def test_records_live_strengths(steering: SteeringRegistry, lines: list[str]) -> None:
    """Catches an unrecorded change of live strengths, and one that the engine has not confirmed in the log."""
    running, entry = RunningRequests(), RunningRequest(b"")
    running.add_sample(entry, "cmpl-one-0", LiveSample("sample", "live id"))
    app = FastAPI()
    app.include_router(live.make_router(running, ConfirmingEngine()))
    transport = httpx.ASGITransport(app=with_key(app, None), client=("192.0.2.7", 4711))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        lines.clear()
        for body, status in (({"calm": "x"}, 400), ({"calm": 0.5}, 200)):
            assert (await client.post("/v1/steering/requests/one", json=body)).status_code == status
        assert (await client.post("/v1/steering/requests/two", json={"calm": 0.5})).status_code == 404
    (line,) = lines
    record = json.loads(line)
    assert list(record) == list(audit.FIELDS)
    assert (record["event"], record["name"], record["strengths"]) == ("live", "one", {"calm": 0.5})


EVENTS = {"modules": "register", "{name}": "delete", "set": "set", "clear": "clear"}

REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", MODULES, {"json": {"name": "calm"}}),
    ("POST", MODULES, {"json": {"name": "a/b", "base": BASE}}),
    ("POST", MODULES, {"json": {"name": "calm", "base": {"post_block": {"99": pack_vector(vector(0))}}}}),
    ("POST", MODULES, {"content": b"{", "headers": {"content-type": "application/json"}}),
    ("POST", MODULES, {"content": b"0" * 20, "headers": FILE, "params": {"name": "calm"}}),
    ("DELETE", f"{MODULES}/missing", {}),
    ("POST", SET, {"json": {}}),
    ("POST", SET, {"json": {"modules": ["missing"]}}),
]


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Return the lines written to the documented logger."""
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.steering.audit")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield written
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def steering() -> SteeringRegistry:
    made = registry()
    made.register("there", **content(3))
    made.set(modules=["there"])
    return made


def with_key(app: ASGIApp, name: str | None) -> ASGIApp:
    """Return the application behind an authentication that accepts a key of that name."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        with use_key(None if name is None else Key(name, "0" * 64, "s" * 32, tuple(Right))):
            await app(scope, receive, send)

    return guarded


async def ask(
    steering: SteeringRegistry, method: str, path: str, key: str | None = None, **fields: Any
) -> httpx.Response:
    app = FastAPI()
    app.state.args = SimpleNamespace(steering_max_body_mib=1)
    add_module_routes(app, steering)
    transport = httpx.ASGITransport(app=with_key(app, key), client=("192.0.2.7", 4711))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.request(method, path.replace("{name}", "there"), **fields)


def test_covers_every_changing_route() -> None:
    """Catches a new route for changes that the tests of this file do not cover."""
    routes = {(m, r.path) for r in make_router(registry(), 1).routes for m in r.methods}  # type: ignore[attr-defined]
    assert {route for route in routes if route[0] not in ("GET", "HEAD")} == set(CHANGES)


@pytest.mark.parametrize(
    ("method", "path", "fields"), [(*route, fields) for route, each in CHANGES.items() for fields in each]
)
@pytest.mark.parametrize("key", [None, "alice"])
async def test_records_each_change_once(
    steering: SteeringRegistry, lines: list[str], method: str, path: str, fields: dict[str, Any], key: str | None
) -> None:
    """Catches a missing or repeated record, and one with the wrong actor, address, object or epoch."""
    before = steering.status().epoch
    lines.clear()
    answer = (await ask(steering, method, path, key, **fields)).json()
    (line,) = lines
    record = json.loads(line)
    assert list(record) == list(audit.FIELDS)
    assert record["event"] == EVENTS[path.rpartition("/")[2]]
    assert (record["who"], record["address"]) == (key or "anonymous", "192.0.2.7")
    assert (record["epoch_before"], record["epoch_after"]) == (before, before + 1) == (before, answer["epoch"])
    expected = answer.get("deleted") or ([answer["digest"]] if answer.get("digest") else [])
    assert (record["name"], record["digests"]) == (answer.get("name"), expected)
    assert record["time"].endswith("+00:00")


async def test_records_repeated_change_with_equal_epochs(steering: SteeringRegistry, lines: list[str]) -> None:
    """Catches a repeated change that is recorded as another change."""
    for _ in range(2):
        await ask(steering, "POST", MODULES, json={"name": "calm", "base": BASE})
    first, second = map(json.loads, lines[-2:])
    assert second["epoch_before"] == second["epoch_after"] == first["epoch_after"]


@pytest.mark.parametrize(("method", "path", "fields"), REFUSED)
async def test_does_not_record_rejected_changes(
    steering: SteeringRegistry, lines: list[str], method: str, path: str, fields: dict[str, Any]
) -> None:
    """Catches a record of a change that never happened."""
    lines.clear()
    assert 400 <= (await ask(steering, method, path, **fields)).status_code < 500
    assert lines == []


@pytest.mark.parametrize("path", [MODULES, f"{MODULES}/there", SET])
async def test_does_not_record_reads(steering: SteeringRegistry, lines: list[str], path: str) -> None:
    """Catches a log in which reads hide the changes."""
    lines.clear()
    assert (await ask(steering, "GET", path)).status_code == 200
    assert lines == []


def test_records_changes_without_http(steering: SteeringRegistry, lines: list[str], tmp_path: Path) -> None:
    """Catches changes that only routes record, and modules of the server start attributed to a client."""
    path = tmp_path / "calm.safetensors"
    path.write_bytes(write_module(module(5)))
    lines.clear()
    steering.ensure_file("calm", path)
    steering.ensure_file("calm", path)
    steering.clear()
    records = [json.loads(line) for line in lines]
    assert [(r["event"], r["who"], r["address"]) for r in records] == [
        ("register", "start", None),
        ("clear", "offline", None),
    ]


async def test_distinguishes_concurrent_callers(steering: SteeringRegistry, lines: list[str]) -> None:
    """Catches a name that is stored per process instead of per request."""
    lines.clear()
    names = [f"key-{i}" for i in range(8)]
    bodies = [{"name": name, "base": {"post_block": {"1": pack_vector(vector(i))}}} for i, name in enumerate(names)]
    await asyncio.gather(*(ask(steering, "POST", MODULES, b["name"], json=b) for b in bodies))
    records = [json.loads(line) for line in lines]
    assert sorted(r["who"] for r in records) == names
    assert all(r["who"] == r["name"] for r in records)


async def test_escapes_client_text(steering: SteeringRegistry, lines: list[str]) -> None:
    """Catches client text that ends a line, and vectors in the log."""
    lines.clear()
    about = {"description": 'calm\n{"event":"clear"}\u2028\x1b[2J', "provenance": {"a\r\n": "b"}}
    await ask(steering, "POST", MODULES, "ev\nil\u2028", json={"name": "calm", "base": BASE, **about})
    (line,) = lines
    assert line.isascii() and line.isprintable()
    assert "calm\\n" not in line
    assert len(line) < 400


def test_guide_documents_every_field() -> None:
    """Catches a record that differs from its documentation."""
    (table,) = (t for t in tables(read("docs/guides/operating.md")) if t[0] == ["field", "content"])
    assert dict(table[1:]) == {name: text.replace("`", "") for name, text in audit.FIELDS.items()}


def test_records_changed_key_file(lines: list[str], tmp_path: Path) -> None:
    """Catches unrecorded changes of keys, a broken file recorded as a change, and secrets in the log."""
    path = tmp_path / "keys.json"
    alice, secret = generate_key("alice", (), {})
    bob, _ = generate_key("bob", (), {})
    with edit_keys(path, create=True) as write:
        write((alice,))
    followed = KeyFileWatcher(path)
    followed.refresh()
    assert lines == []
    with edit_keys(path) as write:
        write((alice, bob))
    followed.refresh()
    path.write_text("{")
    followed.refresh()
    (line,) = lines
    assert (json.loads(line)["event"], json.loads(line)["name"], json.loads(line)["who"]) == (
        "keys",
        str(path),
        "offline",
    )
    assert not any(word in line for word in (secret, alice.sha256, alice.cache_salt))
