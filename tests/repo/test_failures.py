# SPDX-License-Identifier: Apache-2.0
"""Every failure that must be impossible is named by a test that would see it, and by a negative control."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.repo.tree import python_files, read

NUMBERED = tuple(int(n) for n in re.findall(r"^\| (\d+) \|", read("docs/design/failures.md"), re.MULTILINE))
SHOWN = (1, 2, 3, 5, 6, 8, 9, 10, 11, 12, 13, 16, 17, 18, 19, 20)


def marks(source: str) -> Iterator[tuple[int, bool]]:
    """The number of each mark `failure` on the functions and classes of `source`, and whether it is of a control."""
    for node in ast.walk(ast.parse(source)):
        for decorator in getattr(node, "decorator_list", ()):
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.failure":
                keywords = {each.arg: ast.literal_eval(each.value) for each in decorator.keywords}
                for number in decorator.args:
                    yield ast.literal_eval(number), keywords.get("control", False)


def found() -> dict[int, set[bool]]:
    kinds: dict[int, set[bool]] = defaultdict(set)
    for path in python_files("tests"):
        for number, control in marks(read(path)):
            kinds[number].add(control)
    return kinds


def test_the_list_counts_from_one() -> None:
    """Catches a list whose numbers have moved under the tests that name them."""
    assert tuple(range(1, len(NUMBERED) + 1)) == NUMBERED


def test_marks_name_failures_of_the_list() -> None:
    """Catches a number that nobody can look up."""
    assert set(found()) <= set(NUMBERED)


@pytest.mark.parametrize("number", SHOWN)
def test_a_failure_has_a_test_and_a_control(number: int) -> None:
    """Catches a failure whose test went with a refactoring, and tests of which nobody knows that they can fail."""
    assert found()[number] == {False, True}


def test_marks_are_read() -> None:
    """Catches a search that finds nothing."""
    source = "@pytest.mark.failure(3)\n@pytest.mark.failure(4, control=True)\ndef test(): ..."
    assert sorted(marks(source)) == [(3, False), (4, True)]
