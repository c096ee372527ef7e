# SPDX-License-Identifier: Apache-2.0
"""Record of the tests that prove steering and capture with each engine feature (``pytest.mark.feature``).

    python -m pytest -m feature --features benchmarks/results/features.json

updates the record; ``scripts/reference.py`` generates ``docs/reference/features.md`` from it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SIDES = ("steer", "capture", "react")
"""Edits, captures, and readouts with gates and stops; every feature has the first two."""
ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "features.json"


class FeatureRecord:
    """Pytest plugin that writes the outcomes of marked tests to the record; tests that did not run keep their entry."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[str, set[str]] = {}
        self.marks: dict[str, list[list[str]]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            marks = sorted(list(mark.args) for mark in item.iter_markers("feature"))
            if marks:
                self.marks[_function(item.nodeid)] = marks

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = _function(report.nodeid)
        if name in self.marks and (report.when == "call" or report.outcome != "passed"):
            self.outcomes.setdefault(name, set()).add(report.outcome)

    def pytest_sessionfinish(self) -> None:
        record = json.loads(self.path.read_text()) if self.path.exists() else {}
        for name, outcomes in self.outcomes.items():
            # Skipped on this machine: keep the outcome from another one.
            if outcomes == {"skipped"} and name in record:
                continue
            worst = next(outcome for outcome in ("failed", "skipped", "passed") if outcome in outcomes)
            record[name] = {"features": self.marks[name], "outcome": worst}
        unknown = {"outcome": "not run"}
        kept = {
            name: {**record.get(name, unknown), "features": marks} for name, marks in sorted(marked_tests().items())
        }
        self.path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def _function(nodeid: str) -> str:
    """Return a test's id without its parameters."""
    return nodeid.partition("[")[0]


def marked_tests() -> dict[str, list[list[str]]]:
    """Return all marked test functions with their marks, read from the source."""
    return dict(_marked())


def _marked() -> Iterator[tuple[str, list[list[str]]]]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                marks = sorted(_arguments(each) for each in node.decorator_list if _is_mark(each))
                if marks:
                    yield f"{path.relative_to(ROOT).as_posix()}::{node.name}", marks


def _is_mark(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.feature"


def _arguments(node: Any) -> list[str]:
    return [ast.literal_eval(each) for each in node.args]
