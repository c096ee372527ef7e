# SPDX-License-Identifier: Apache-2.0
"""What is kept for an engine client, and how long."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
from vllm.v1.engine.core_client import MPClient

from tests.server.fakes import FakeEngine
from vllm_steer.capture.manager import CaptureManager
from vllm_steer.frontend import context
from vllm_steer.frontend.context import ensure_engine_context
from vllm_steer.program.program_files import MIN_PROGRAM_BYTES


async def test_consumers_are_closed_with_their_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches files of many requests that are lost at the end of a script, since nobody completes them."""
    closed: list[CaptureManager] = []
    monkeypatch.setattr(CaptureManager, "close", lambda desk: closed.append(desk))
    engine = FakeEngine()
    served = await ensure_engine_context(engine)
    gc.collect()
    assert served is not None and closed == []
    del engine
    gc.collect()
    assert closed == [served.capture_manager]


async def test_files_of_programs_go_with_their_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches vectors that stay on the disk when an engine is gone and its process is not."""
    monkeypatch.setattr(context, "_shares_files", lambda engine: True)
    engine = FakeEngine()
    served = await ensure_engine_context(engine)
    assert served is not None and served.program_files is not None
    program = bytes(MIN_PROGRAM_BYTES)
    served.program_files.reference(program)
    assert served.program_files.reference(program) is not None and served.program_files._directory is not None
    folder = served.program_files._directory.path
    assert folder.is_dir()
    del engine
    gc.collect()
    assert not folder.exists()


async def test_an_engine_in_this_process_or_on_another_host_gets_no_files() -> None:
    """Catches a name sent to where the file is not."""
    served = await ensure_engine_context(FakeEngine())
    assert served is not None and served.program_files is None
    client = object.__new__(MPClient)
    for size, local, backend, shared in ((1, 1, "mp", True), (2, 2, "mp", True), (2, 1, "mp", False),
                                         (1, 0, "mp", False), (2, 2, "ray", False)):  # fmt: skip
        parallel = SimpleNamespace(
            data_parallel_size=size, data_parallel_size_local=local, data_parallel_backend=backend
        )
        config = SimpleNamespace(parallel_config=parallel)
        assert context._shares_files(SimpleNamespace(engine_core=client, vllm_config=config)) is shared
