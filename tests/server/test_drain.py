# SPDX-License-Identifier: Apache-2.0
"""Shutdown of API servers: running requests finish, and new ones are refused with HTTP 503."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from tests.server.application import client_of, make_app
from tests.server.fakes import FakeEngine
from tests.server.server import MODEL, run_server
from vllm_steer.capture.files.reader import open_captures
from vllm_steer.server import drain

STREAMS, TOKENS = 6, 200
ROUTE = "/v1/completions"


class EndingEngine(FakeEngine):
    """An engine client that records when it leaves the engine, and which requests it ends."""

    def __init__(self, *, owns_engine: bool) -> None:
        super().__init__()
        manager = object() if owns_engine else None
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))
        self.output_processor.request_states = {"a": None}
        self.events: list[Any] = []

    async def abort(self, request_ids: list[str], internal: bool) -> None:
        self.events.append(request_ids)

    def leave(self, timeout: float | None = None) -> None:
        self.events.append("left")


async def started(engine: EndingEngine) -> AsyncIterator[tuple[drain.Drain, httpx.AsyncClient]]:
    app = make_app(engine)
    drain.start_drain(app, engine)
    state = drain.drain_of(app)
    assert state is not None
    async with client_of(app) as client:
        yield state, client


async def test_leaves_the_engine_after_its_requests() -> None:
    """Catches an API server that closes its connection to the engine ahead of its streams, and late requests."""
    engine = EndingEngine(owns_engine=False)
    async for state, client in started(engine):
        assert (await client.post(ROUTE, json={})).status_code == 200
        assert state.active == 0
        state.active = 1  # a stream
        ending = asyncio.create_task(asyncio.to_thread(drain.shutdown, EndingEngine.leave, engine, timeout=600))
        while not state.draining:
            await asyncio.sleep(0.01)
        for path in (ROUTE, "/tokenize", "/v1/steering/clear"):
            response = await client.post(path, json={})
            assert response.status_code == 503, path
            assert "shutting down" in response.json()["error"]["message"] and response.headers["retry-after"]
        assert (await client.get("/v1/captures/x")).status_code != 503
        assert engine.events == [] and not ending.done()
        state.active = 0
        await ending
    assert engine.events == ["left"]


async def test_ends_requests_that_do_not_finish() -> None:
    """Catches requests cut off by the parent's kill, whose files are then incomplete."""
    engine = EndingEngine(owns_engine=False)
    async for state, _ in started(engine):
        state.active = 1
        await asyncio.to_thread(drain.shutdown, EndingEngine.leave, engine, timeout=0.2)
    assert engine.events == [["a"], "left"]


@pytest.mark.parametrize(("owns_engine", "timeout"), [(True, 600), (False, 0), (False, None)])
async def test_does_not_wait_without_reason(owns_engine: bool, timeout: float | None) -> None:
    """Catches a wait where vLLM drains the engine itself, or where the operator wants none."""
    engine = EndingEngine(owns_engine=owns_engine)
    async for state, _ in started(engine):
        state.active = 1
        await asyncio.to_thread(drain.shutdown, EndingEngine.leave, engine, timeout=timeout)
    assert engine.events == ["left"]


async def test_does_not_wait_in_the_event_loop() -> None:
    """Catches a deadlock: vLLM shuts the client down once more in the event loop, which serves the requests."""
    engine = EndingEngine(owns_engine=False)
    async for state, _ in started(engine):
        state.active = 1
        drain.shutdown(EndingEngine.leave, engine, timeout=600)
    assert engine.events == ["left"]


async def read_stream(client: httpx.AsyncClient, started: asyncio.Semaphore) -> tuple[str | None, str | None]:
    """Return why a stream ended, and the status of its capture."""
    spec = {"hooks": {"post_block": [1]}, "positions": "last_prompt"}
    body = {"model": MODEL, "prompt": "abc", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    reason = status = None
    async with client.stream("POST", ROUTE, json={**body, "capture": {"filesystem": spec}}) as response:
        async for line in response.aiter_lines():
            started.release()
            for choice in json.loads(line[6:]).get("choices", []) if line.startswith("data: {") else ():
                reason = choice.get("finish_reason") or reason
                status = choice.get("capture_results", {}).get("filesystem", {}).get("status") or status
    return reason, status


@pytest.mark.slow
async def test_two_api_servers_finish_their_streams(model: Path, tmp_path: Path) -> None:
    """Catches streams and captures that are lost at SIGTERM although ``--shutdown-timeout`` gives them time."""
    flags = ["--enable-steering", "--api-server-count", "2", "--shutdown-timeout", "300"]
    flags += ["--capture-consumers", f"filesystem:root={tmp_path / 'acts'}"]
    running = run_server(model, flags, tmp_path / "log")
    url = next(running)
    port = httpx.URL(url).port
    (parent,) = (
        process
        for process in psutil.Process().children(recursive=True)
        if str(port) in process.cmdline() and process.ppid() == psutil.Process().pid
    )
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(read_stream(client, begun)) for _ in range(STREAMS)]
        for _ in range(3 * STREAMS):
            await begun.acquire()
        parent.send_signal(signal.SIGTERM)
        assert await asyncio.gather(*streams) == [("length", "ok")] * STREAMS
    parent.wait(300)
    assert len(open_captures(tmp_path / "acts")) == STREAMS
    running.close()  # type: ignore[attr-defined]
