# SPDX-License-Identifier: Apache-2.0
"""Tests of the code digests in benchmark results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.build import builds_in, changed, digests
from tests.repo.tree import python_files, read

SOURCE = '''# A comment.
"""About it."""

LIMIT = 3
"""Of something."""


def scale(x):
    """Twice as much."""
    # Why.
    return 2 * x
'''


def package(folder: Path, source: str) -> Path:
    (folder / "taps").mkdir(parents=True)
    (folder / "taps" / "kernel.py").write_text(source)
    (folder / "plugin.py").write_text("NAME = 'x'\n")
    return folder


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (SOURCE.replace("A comment.", "Another.").replace("Twice as much.", "Two\n    lines.\n"), []),
        (SOURCE.replace("    # Why.\n", "").replace("Of something.", "Of nothing."), []),
        (SOURCE.replace("2 * x", "3 * x"), ["taps"]),
        (SOURCE.replace("LIMIT = 3", "LIMIT = 4"), ["taps"]),
    ],
)
def test_digest_ignores_comments_and_docstrings(tmp_path: Path, source: str, parts: list[str]) -> None:
    """Catches an unchanged digest after a code change, and a changed one after a comment."""
    then, now = digests(package(tmp_path / "then", SOURCE)), digests(package(tmp_path / "now", source))
    assert changed(then, now) == parts


def test_moved_modules_are_changes(tmp_path: Path) -> None:
    """Catches a module that moves between parts without being reported."""
    folder = package(tmp_path, SOURCE)
    then = digests(folder)
    (folder / "taps" / "kernel.py").rename(folder / "kernel.py")
    assert changed(then, digests(folder)) == ["kernel", "taps"]


def test_digests_cover_the_package() -> None:
    """Catches digests of another directory, or of nothing."""
    assert {"taps", "engine", "capture", "params"} <= digests().keys()


def test_finds_builds_at_any_depth() -> None:
    """Catches nested builds that are not compared."""
    result = {"build": {"taps": "a"}, "runs": [{"x": 1, "build": {"taps": "b"}}, {"cells": {"y": {"build": {}}}}]}
    assert builds_in(result) == [{"taps": "a"}, {"taps": "b"}, {}]


def test_readme_lists_every_script() -> None:
    """Catches a benchmark that is not documented."""
    text = read("benchmarks/README.md")
    scripts = [path.stem for path in python_files("benchmarks") if "def main(" in read(path)]
    assert len(scripts) > 10
    assert [name for name in scripts if not re.search(rf"(`|benchmarks\.){name}\b", text)] == []
