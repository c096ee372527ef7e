# SPDX-License-Identifier: Apache-2.0
"""One in-process engine for the tests of this folder."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import forget_engine, make_llm, save_tiny_llama
from tests.warm import warm_workers
from vllm_steer.testing.heap import exclude_existing_objects


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session", autouse=True)
def warm_processes() -> Iterator[None]:
    """Start the processes of engines with vLLM imported."""
    with pytest.MonkeyPatch.context() as patch:
        warm_workers(patch)
        yield


def close(llm: Any) -> None:
    """Shut down an in-process engine, so that the next one can start in the same process.

    Its callers' names for it refer to an empty object afterwards: what is alive when the objects are excluded from
    collections is never freed.
    """
    compiled = not llm.llm_engine.vllm_config.model_config.enforce_eager
    llm.llm_engine.engine_core.shutdown()
    vars(llm).clear()
    gc.collect()  # frees the model; its embedding, which vLLM's table of layers refers to, goes with the next one
    forget_engine(compiled=compiled)
    exclude_existing_objects()  # among them the modules that the engine has loaded


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[Any]:
    """Start an in-process engine; see `make_llm`. It is closed at the end."""
    llm = make_llm(folder, **options)
    try:
        yield llm
    finally:
        close(llm)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[Any]:
    with opened(tiny_llama) as engine:
        yield engine
