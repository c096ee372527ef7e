# SPDX-License-Identifier: Apache-2.0
"""An engine of the tiny model, for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import close
from tests.tiny import make_llm, save_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    engine = make_llm(folder)
    yield engine
    close(engine)
