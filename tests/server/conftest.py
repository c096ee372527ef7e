# SPDX-License-Identifier: Apache-2.0
"""Model and servers shared by the server tests.

Imports are in the fixtures, because pytest-xdist's own process imports this file before the workers start.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import httpx
import pytest

_read_once = cache(entry_points)


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redirect temporary files of in-process applications to the test's folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(autouse=True)
def packages_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look once for consumers of installed packages, not for each application: it reads the metadata of all."""
    monkeypatch.setattr("vllm_steer.capture.consumers.discovery.entry_points", _read_once)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.server.server import save_model

    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def capture_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the server's ``filesystem`` consumer."""
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="session")
def url(model: Path, capture_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from tests.server.server import run_server

    flags = ["--enable-steering", "--steering-max-body-mib", "1", "--enable-scale-out"]
    flags += ["--capture-consumers", f"filesystem:root={capture_root}"]
    flags += ["--capture-inline-kib", "16", "--capture-store-mib", "1", "--capture-expiry-s", "15"]
    log = tmp_path_factory.mktemp("log") / "server.log"
    yield from run_server(model, flags, log, worker_process=True)


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client
