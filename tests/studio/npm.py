# SPDX-License-Identifier: Apache-2.0
"""Packages of the npm registry that tests need: pinned, and never installed into the project."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

PACKAGES = {
    "axe-core@4.14.1": "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
    "typescript@5.9.3": "jl1vZzPDinLr9eUt3J/t7V6FgNEw9QjvBPdysz9KfQDD41fQrC2Y4vKQdiaUpFT4bXlb1RHhLpp8wtm6M5TgSw==",
}
"""Digests (SHA-512) of the packages' archives."""
REQUIRED = "VLLM_STEER_REQUIRE_NPM"
"""Variable that makes a package that cannot be had a failure instead of a skipped test."""


def download(package: str, folder: Path) -> Path:
    """Download a package and return its archive; skip the test if npm or its registry cannot be reached."""
    npm = shutil.which("npm")
    command = [npm or "npm", "pack", "--silent", "--ignore-scripts", "--fetch-retries=0", package]
    if npm is None or subprocess.run(command, cwd=folder, capture_output=True, timeout=120).returncode:
        (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(f"npm or its registry cannot be reached: {package}")
    return next(folder.glob("*.tgz"))


def unpack(package: str, folder: Path) -> Path:
    """Download a package of `PACKAGES`, and return its folder."""
    archive = download(package, folder)
    assert base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode() == PACKAGES[package]
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / "package"
