# SPDX-License-Identifier: Apache-2.0
"""Tests of the context of an engine client and its lifetime."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.v1.engine.core_client import MPClient

from tests.server.fakes import FakeEngine
from vllm_steer.capture.manager import CaptureManager
from vllm_steer.errors import SteeringError
from vllm_steer.frontend import context
from vllm_steer.frontend.context import RegistryOptions, ensure_engine_context
from vllm_steer.program.program_files import MIN_PROGRAM_BYTES
from vllm_steer.settings import CONSUMERS_VARIABLE


async def test_closes_consumers_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches files of several requests that are never completed at the end of a script."""
    gc.collect()  # engines of other tests
    closed: list[CaptureManager] = []
    monkeypatch.setattr(CaptureManager, "close", lambda manager: closed.append(manager))
    engine = FakeEngine()
    engine_context = await ensure_engine_context(engine)
    gc.collect()
    assert engine_context is not None and engine_context.capture_manager not in closed
    del engine
    gc.collect()
    assert closed.count(engine_context.capture_manager) == 1


async def test_closes_consumers_if_the_registry_is_refused(tmp_path: Path) -> None:
    """Catches the name of a run that counts as in use after a start that failed, until the process ends."""
    consumers = {"filesystem": {"root": str(tmp_path / "acts"), "run": "x"}}
    engine = FakeEngine()
    engine.vllm_config.parallel_config._api_process_count = 1
    missing = RegistryOptions(modules={"calm": str(tmp_path / "missing.safetensors")})
    context.set_options(engine, consumers=consumers, registry=missing)
    with pytest.raises(SteeringError, match=r"missing\.safetensors cannot be read"):
        await ensure_engine_context(engine)
    context.set_options(engine, consumers=consumers, registry=RegistryOptions())
    assert await ensure_engine_context(engine) is not None


async def test_removes_program_files_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches vectors that stay on disk after the engine is deleted."""
    monkeypatch.setattr(context, "_shares_files", lambda engine: True)
    engine = FakeEngine()
    engine_context = await ensure_engine_context(engine)
    assert engine_context is not None and engine_context.program_files is not None
    program = bytes(MIN_PROGRAM_BYTES)
    engine_context.program_files.reference(program)
    assert (
        engine_context.program_files.reference(program) is not None
        and engine_context.program_files._directory is not None
    )
    folder = engine_context.program_files._directory.path
    assert folder.is_dir()
    del engine
    gc.collect()
    assert not folder.exists()


async def test_passes_files_to_local_processes_only() -> None:
    """Catches a path sent to an engine that cannot read it."""
    engine_context = await ensure_engine_context(FakeEngine())
    assert engine_context is not None and engine_context.program_files is None
    client = object.__new__(MPClient)
    for size, local, backend, shared in ((1, 1, "mp", True), (2, 2, "mp", True), (2, 1, "mp", False),
                                         (1, 0, "mp", False), (2, 2, "ray", False)):  # fmt: skip
        parallel = SimpleNamespace(
            data_parallel_size=size, data_parallel_size_local=local, data_parallel_backend=backend
        )
        config = SimpleNamespace(parallel_config=parallel)
        assert context._shares_files(SimpleNamespace(engine_core=client, vllm_config=config)) is shared


@pytest.mark.parametrize(
    ("count", "rank", "given", "run"),
    [(1, 0, "x", "x"), (4, 0, "x", "x-0"), (4, 3, "x", "x-3"), (4, 1, None, None)],
)
def test_each_api_server_has_a_run(
    monkeypatch: pytest.MonkeyPatch, count: int, rank: int, given: str | None, run: str | None
) -> None:
    """Catches API servers that share the name of a run, in which each numbers its requests from 0."""
    options = {"filesystem": {"root": "acts"} | ({"run": given} if given else {}), "logging": {}}
    monkeypatch.setenv(CONSUMERS_VARIABLE, json.dumps(options))
    parallel = SimpleNamespace(_api_process_count=count, _api_process_rank=rank)
    engine = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
    found = context._consumer_options(engine)
    assert found["filesystem"].get("run") == run
    assert (found["filesystem"]["root"], found["logging"]) == ("acts", {})
    context.set_options(engine, consumers={"filesystem": {"root": "acts", "run": "y"}})
    assert context._consumer_options(engine)["filesystem"]["run"] == (f"y-{rank}" if count > 1 else "y")
