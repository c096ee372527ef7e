# SPDX-License-Identifier: Apache-2.0
"""The model of the server tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.server import save_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))
