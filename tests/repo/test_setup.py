# SPDX-License-Identifier: Apache-2.0
"""Failures of `scripts/setup.sh`: one sentence and a non-zero exit status."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.tree import ROOT

CLOSED_PORT = "http://127.0.0.1:9/simple"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a folder with the files that the set-up reads. Its name contains a space."""
    root = tmp_path / "a clone"
    for name in ("requirements", "scripts"):
        shutil.copytree(ROOT / name, root / name)
    for name in ("pyproject.toml", "README.md", "LICENSE", "Makefile"):
        shutil.copy(ROOT / name, root / name)
    return root


def set_up(root: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the set-up without the caller's pip settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": CLOSED_PORT, **settings}
    return subprocess.run(
        ["bash", root / "scripts/setup.sh"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def fake_python(folder: Path, version: str) -> Path:
    """Create a command that runs this Python and reports another version."""
    code = f"import sys; sys.version_info = {version}; exec(sys.argv[1])"
    path = folder / "python"
    path.write_text(f"""#!/bin/sh\nshift\nexec "{sys.executable}" -c '{code}' "$@"\n""")
    path.chmod(0o755)
    return path


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("set-up: ") and line.endswith(".")
    for word in words:
        assert word in line


@pytest.mark.parametrize("version", ["(3, 10, 9)", "(3, 14, 0)"])
def test_wrong_python_is_refused(clone: Path, version: str) -> None:
    """Catches a set-up that continues with a Python without wheels for the pinned packages."""
    python = fake_python(clone, version)
    shown = ".".join(version.strip("()").split(", ")[:2])
    assert_refused(set_up(clone, PYTHON=str(python)), f"is Python {shown}", "needs Python 3.11, 3.12 or 3.13")
    assert not (clone / ".venv").exists()


def test_missing_python_is_refused(clone: Path) -> None:
    """Catches a missing `PYTHON` that silently falls back to another one."""
    assert_refused(set_up(clone, PYTHON="python-that-is-not-there"), "python-that-is-not-there was not found")


def test_no_python_at_all_is_refused(clone: Path, tmp_path: Path) -> None:
    """Catches a shell error instead of a message when no Python is installed."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "cat", "dirname"):
        (tools / name).symlink_to(str(shutil.which(name)))
    assert_refused(set_up(clone, PATH=str(tools)), "no Python 3.11, 3.12 or 3.13", "was found")


def test_unknown_lane_is_refused(clone: Path) -> None:
    """Catches a misspelt lane that installs the default lane."""
    assert_refused(set_up(clone, LANE="gpu"), "LANE is 'gpu'", "cpu or cuda")


@pytest.mark.slow
def test_missing_network_is_reported(clone: Path) -> None:
    """Catches pip's raw output as the only message, and a stamp after a failed set-up."""
    done = set_up(clone, PYTHON=sys.executable)
    assert_refused(done, "the package index cannot be reached", ".venv/setup.log")
    assert not (clone / ".venv/setup.stamp").exists()


def test_make_fails_if_the_setup_fails(clone: Path) -> None:
    """Catches a Makefile that runs the tests without an environment."""
    done = subprocess.run(
        ["make", "test", "PYTHON=python-that-is-not-there"],
        cwd=clone,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "python-that-is-not-there was not found" in done.stderr


def test_linked_environment_is_left_alone(clone: Path, tmp_path: Path) -> None:
    """Catches a set-up in a worktree that empties the environment of the checkout to which `.venv` is a link."""
    linked = tmp_path / "environment"
    (clone / ".venv").symlink_to(linked)
    assert_refused(set_up(clone), "is a link", "has no Python")
    (linked / "bin").mkdir(parents=True)
    (linked / "bin/python").symlink_to(sys.executable)
    done = set_up(clone)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.relative_to(linked).as_posix() for path in sorted(linked.rglob("*"))] == ["bin", "bin/python"]
