# SPDX-License-Identifier: Apache-2.0
"""One in-process engine for the tests of this folder."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_llm, save_tiny_llama
from vllm_steer.testing.heap import exclude_existing_objects


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


def close(llm: Any) -> None:
    """Shut down an in-process engine, so that the next one can start in the same process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    exclude_existing_objects()  # among them the modules that the engine has loaded


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[Any]:
    engine = make_llm(tiny_llama)
    yield engine
    close(engine)
