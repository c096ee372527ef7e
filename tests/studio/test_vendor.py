# SPDX-License-Identifier: Apache-2.0
"""The modules of other projects in the page equal the files of the registry's packages."""

from __future__ import annotations

import base64
import hashlib
import re
import tarfile
from pathlib import Path

import pytest

from tests.repo.tree import ROOT
from tests.studio.npm import download

VENDOR = ROOT / "vllm_steer" / "studio" / "page" / "vendor"
ENTRY = re.compile(r"^(\S+\.js): (\S+@[\d.]+) (\S+) \(\S+\), package (sha512-\S+), file (sha384-\S+)$", re.MULTILINE)
ENTRIES = ENTRY.findall((VENDOR / "LICENSES.txt").read_text())


def digest(name: str, content: bytes) -> str:
    """Return the digest as npm and browsers write it."""
    return f"{name}-{base64.b64encode(hashlib.new(name, content).digest()).decode()}"


def test_each_module_has_an_entry() -> None:
    """Catches a module without a licence or a version."""
    assert sorted(name for name, *_ in ENTRIES) == sorted(path.name for path in VENDOR.glob("*.js"))


@pytest.mark.parametrize(("name", "package", "member", "archive", "own"), ENTRIES, ids=[name for name, *_ in ENTRIES])
def test_modules_are_unmodified(name: str, package: str, member: str, archive: str, own: str, tmp_path: Path) -> None:
    """Catches a module that was edited here, or an entry that names another package.

    Without npm or the registry, only the file here is compared.
    """
    content = (VENDOR / name).read_bytes()
    assert digest("sha384", content) == own
    packed = download(package, tmp_path)
    assert digest("sha512", packed.read_bytes()) == archive
    with tarfile.open(packed) as files:
        entry = files.extractfile(f"package/{member}")
        assert entry is not None
        assert entry.read() == content
