# SPDX-License-Identifier: Apache-2.0
"""Consumers begin and end with the server."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.server.fakes import FakeEngine
from tests.server.http.answers import make_capturing_app
from vllm_steer.capture.manager import CaptureManager
from vllm_steer.frontend.context import CONSUMERS_VARIABLE, REGISTRY_VARIABLE


class Server:
    """The server's side of the lifespan protocol."""

    def __init__(self, app: Any) -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.task = asyncio.create_task(app({"type": "lifespan", "state": {}}, self._messages.get, self.sent.put))

    async def tell(self, kind: str) -> dict[str, Any]:
        await self._messages.put({"type": f"lifespan.{kind}"})
        return await asyncio.wait_for(self.sent.get(), 10)


async def test_consumers_complete_their_files_before_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches files of many requests that are lost since the process ends before they are complete."""
    closed = []

    def close(desk: CaptureManager) -> None:
        time.sleep(0.2)
        closed.append(desk)

    monkeypatch.setattr(CaptureManager, "close", close)
    server = Server(make_capturing_app([]))
    assert (await server.tell("startup"))["type"] == "lifespan.startup.complete"
    assert closed == []
    assert (await server.tell("shutdown"))["type"] == "lifespan.shutdown.complete"
    assert len(closed) == 1
    await asyncio.wait_for(server.task, 10)


async def test_a_consumer_that_cannot_work_ends_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a server whose captures all fail, or that answers HTTP 500 to the first, for a wrong flag."""
    (tmp_path / "file").write_text("")
    options = {"filesystem": {"root": str(tmp_path / "file")}}
    monkeypatch.setenv(CONSUMERS_VARIABLE, json.dumps(options))
    message = await Server(make_capturing_app([])).tell("startup")
    assert message["type"] == "lifespan.startup.failed"
    assert "cannot write captures to" in message["message"]


async def test_a_registry_that_cannot_be_used_ends_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a server that keeps modules where others can change them, or goes without those that it was told of."""
    tmp_path.chmod(0o777)
    monkeypatch.setenv(REGISTRY_VARIABLE, json.dumps({"folder": str(tmp_path)}))
    message = await Server(make_capturing_app([])).tell("startup")
    assert message["type"] == "lifespan.startup.failed"
    assert "others can write" in message["message"]
    (tmp_path / "calm.safetensors").write_bytes(b"x")
    monkeypatch.setenv(REGISTRY_VARIABLE, json.dumps({"modules": {"calm": str(tmp_path / "calm.safetensors")}}))
    message = await Server(make_capturing_app([])).tell("startup")
    assert message["type"] == "lifespan.startup.failed"
    assert "calm.safetensors: file: is not a safetensors file" in message["message"]


@pytest.mark.parametrize("engine", [None, FakeEngine(steering=False)])
async def test_other_servers_start_and_end(engine: FakeEngine | None) -> None:
    """Catches a stock server, or one without an engine, that does not start for our sake."""
    app = make_capturing_app([])
    app.state.engine_client = engine
    server = Server(app)
    assert (await server.tell("startup"))["type"] == "lifespan.startup.complete"
    assert (await server.tell("shutdown"))["type"] == "lifespan.shutdown.complete"
