# SPDX-License-Identifier: Apache-2.0
"""Each failure in docs/design/failures.md has a test that detects it and a negative control."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

from tests.repo.tree import python_files, read

NUMBERED = tuple(int(n) for n in re.findall(r"^\| (\d+) \|", read("docs/design/failures.md"), re.MULTILINE))
COVERED = (1, 2, 3, 5, 6, 8, 9, 10, 11, 12, 13, 16, 17, 18, 19, 20)


def marks(source: str) -> Iterator[tuple[int, bool]]:
    """Yield the number of each `failure` mark in `source` and whether the mark is on a negative control."""
    for node in ast.walk(ast.parse(source)):
        for decorator in getattr(node, "decorator_list", ()):
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.failure":
                keywords = {each.arg: ast.literal_eval(each.value) for each in decorator.keywords}
                for number in decorator.args:
                    yield ast.literal_eval(number), keywords.get("control", False)


@cache
def marks_by_failure() -> dict[int, set[bool]]:
    """Return, for each failure number, whether the tests that carry it are tests, controls, or both."""
    kinds: dict[int, set[bool]] = defaultdict(set)
    for path in python_files("tests"):
        source = read(path)
        for number, control in marks(source) if "mark.failure" in source else ():
            kinds[number].add(control)
    return kinds


def test_failures_are_numbered_from_one() -> None:
    """Catches renumbered failures, which would leave the marks in the tests wrong."""
    assert tuple(range(1, len(NUMBERED) + 1)) == NUMBERED


def test_marks_name_listed_failures() -> None:
    """Catches a mark with a number that the page does not list."""
    assert set(marks_by_failure()) <= set(NUMBERED)


def test_covered_failures_have_a_test_and_a_control() -> None:
    """Catches a failure whose test was lost in a refactoring, and a test without proof that it can fail."""
    marked = marks_by_failure()
    assert [number for number in COVERED if marked[number] != {False, True}] == []


def test_marks_are_found() -> None:
    """Catches a search that never finds anything."""
    source = "@pytest.mark.failure(3)\n@pytest.mark.failure(4, control=True)\ndef test(): ..."
    assert sorted(marks(source)) == [(3, False), (4, True)]
