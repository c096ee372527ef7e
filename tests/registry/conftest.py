# SPDX-License-Identifier: Apache-2.0
"""Every kind of storage for the tests of registries."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.postgresql import postgres_server
from tests.registry.backends import Backend, FolderBackend, PostgresBackend, SqliteBackend

__all__ = ["backend", "postgres_server"]


@pytest.fixture(params=["folder", "sqlite", "postgresql"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """Return an empty storage."""
    if request.param == "folder":
        return FolderBackend(tmp_path / "registry")
    if request.param == "sqlite":
        return SqliteBackend(tmp_path / "registry.db")
    return PostgresBackend(request.getfixturevalue("postgres_server"))
