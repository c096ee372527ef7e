# SPDX-License-Identifier: Apache-2.0
"""A real server with the chat model, the studio and API keys, and Debian's Chromium with a page of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.repo.tree import ROOT, load_script
from tests.server.auth.guarded import EVERYTHING, write_keys
from tests.server.server import run_server
from tests.studio.browser import Opened, Server
from vllm_steer.server.auth.rights import Right

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="session")
def script() -> ModuleType:
    """Return `scripts/studio.py`."""
    return load_script("studio")


@pytest.fixture(scope="session")
def server(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run the server of `make studio` with keys. It has the module `mood`."""
    folder = tmp_path_factory.mktemp("studio")
    if CHROMIUM is None:
        pytest.skip("Chromium is missing: run scripts/install_chromium.sh")
    if not script.MODEL.is_dir():
        pytest.skip("the chat model is missing: run `make model`")
    secrets = write_keys(folder / "keys.json", {"all": EVERYTHING, "reader": (Right.READ,)})
    flags = [*script.SETTINGS, "--steering-keys", str(folder / "keys.json")]
    for url in run_server(script.MODEL, flags, folder / "log"):
        script.register_mood(url, secrets["all"])
        yield Server(url, secrets)


@pytest.fixture(scope="package")
def chromium() -> Iterator[object]:
    """Run Chromium without a display."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(server: Server, chromium: object) -> Iterator[Opened]:
    """Open the page in a new context. At the end, no request went to another host and no script failed."""
    opened = Opened(chromium, server)
    yield opened
    opened.close()


@pytest.fixture
def pictures(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the folder for screenshots: docs/assets with `--record-screenshots`."""
    return ROOT / "docs" / "assets" if request.config.getoption("--record-screenshots") else tmp_path
