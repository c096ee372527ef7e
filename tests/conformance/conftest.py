# SPDX-License-Identifier: Apache-2.0
"""Fixtures: one reference process and one folder of models per test session."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.engine import prepare_environment
from tests.conformance.reference_process import ReferenceProcess

prepare_environment()


@pytest.fixture(scope="session")
def reference_process() -> Iterator[ReferenceProcess]:
    """Return HF Transformers in a process without vLLM."""
    with ReferenceProcess() as process:
        yield process


@pytest.fixture(scope="session")
def zoo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tiny models."""
    return tmp_path_factory.mktemp("zoo")


def pytest_sessionfinish() -> None:
    """Unfreeze the heap that the engines froze, so that extension modules report no leaks at exit."""
    gc.unfreeze()
