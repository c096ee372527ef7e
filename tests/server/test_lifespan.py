# SPDX-License-Identifier: Apache-2.0
"""Start and shutdown of API servers: consumers, registry and store."""

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
from vllm_steer.compat.internals import envs
from vllm_steer.settings import CONSUMERS_VARIABLE, REGISTRY_VARIABLE

VARIABLE = "VLLM_COMPUTE_NANS_IN_LOGITS"


class Server:
    """The server's side of the lifespan protocol."""

    def __init__(self, app: Any) -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.task = asyncio.create_task(app({"type": "lifespan", "state": {}}, self._messages.get, self.sent.put))

    async def tell(self, kind: str) -> dict[str, Any]:
        await self._messages.put({"type": f"lifespan.{kind}"})
        return await asyncio.wait_for(self.sent.get(), 10)


async def test_shutdown_completes_consumer_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a process that exits before its consumers have completed their files."""
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


async def test_vllm_reads_no_variables_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches variables that vLLM reads from the environment for each token, and a process that keeps old values."""
    reads: list[int] = []
    monkeypatch.setitem(envs.environment_variables, VARIABLE, lambda: reads.append(1) or False)
    server = Server(make_capturing_app([]))
    await server.tell("startup")
    reads.clear()
    assert not getattr(envs, VARIABLE) and not reads
    await server.tell("shutdown")
    await asyncio.wait_for(server.task, 10)
    assert not getattr(envs, VARIABLE) and reads


async def test_a_broken_consumer_fails_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a server that starts although all its captures would fail."""
    (tmp_path / "file").write_text("")
    options = {"filesystem": {"root": str(tmp_path / "file")}}
    monkeypatch.setenv(CONSUMERS_VARIABLE, json.dumps(options))
    message = await Server(make_capturing_app([])).tell("startup")
    assert message["type"] == "lifespan.startup.failed"
    assert "cannot write captures to" in message["message"]


async def test_a_broken_registry_fails_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a registry that other users can change, and modules from the command line that are dropped."""
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
async def test_servers_without_steering_start_and_stop(engine: FakeEngine | None) -> None:
    """Catches a stock server, or one without an engine, that our code prevents from starting."""
    app = make_capturing_app([])
    app.state.engine_client = engine
    server = Server(app)
    assert (await server.tell("startup"))["type"] == "lifespan.startup.complete"
    assert (await server.tell("shutdown"))["type"] == "lifespan.shutdown.complete"
