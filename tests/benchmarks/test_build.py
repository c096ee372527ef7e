# SPDX-License-Identifier: Apache-2.0
"""A result says which code it is of."""

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
def test_code_that_changed_is_told_from_words_that_did(tmp_path: Path, source: str, parts: list[str]) -> None:
    """Catches a result taken for one of this code after a kernel was changed, or thrown away for a comment."""
    then, now = digests(package(tmp_path / "then", SOURCE)), digests(package(tmp_path / "now", source))
    assert changed(then, now) == parts


def test_parts_that_come_and_go_are_changes(tmp_path: Path) -> None:
    """Catches a module that was moved from one part to another, or away, and is not missed."""
    folder = package(tmp_path, SOURCE)
    then = digests(folder)
    (folder / "taps" / "kernel.py").rename(folder / "kernel.py")
    assert changed(then, digests(folder)) == ["kernel", "taps"]


def test_this_package_has_its_parts() -> None:
    """Catches digests of another folder, or of nothing."""
    assert {"taps", "engine", "capture", "params"} <= digests().keys()


def test_builds_are_found_where_they_stand() -> None:
    """Catches a file whose cells are each of a build of their own, of which none is compared."""
    result = {"build": {"taps": "a"}, "runs": [{"x": 1, "build": {"taps": "b"}}, {"cells": {"y": {"build": {}}}}]}
    assert builds_in(result) == [{"taps": "a"}, {"taps": "b"}, {}]


def test_every_script_is_in_the_readme() -> None:
    """Catches a benchmark that nobody runs again, since nothing says that it is there."""
    text = read("benchmarks/README.md")
    scripts = [path.stem for path in python_files("benchmarks") if "def main(" in read(path)]
    assert len(scripts) > 10
    assert [name for name in scripts if not re.search(rf"(`|benchmarks\.){name}\b", text)] == []
