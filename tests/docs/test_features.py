# SPDX-License-Identifier: Apache-2.0
"""The record of features is that of the marks in the tests, and all of it passed."""

from __future__ import annotations

import json

from tests.features import RECORD, SIDES, marked_tests

UPDATE = "python -m pytest -m feature --features benchmarks/results/features.json"


def test_the_record_is_that_of_the_marks() -> None:
    """Catches a feature claimed in the table whose test is gone, and one that is proven and not in the table."""
    recorded = {name: entry["features"] for name, entry in json.loads(RECORD.read_text()).items()}
    assert recorded == marked_tests(), UPDATE


def test_all_of_it_passed() -> None:
    """Catches a table made from failing tests. What was skipped needs a GPU, and the table says so."""
    failed = [name for name, entry in json.loads(RECORD.read_text()).items() if entry["outcome"] == "failed"]
    assert not failed, UPDATE


def test_no_row_is_half_proven() -> None:
    """Catches a feature under which requests are steered and nobody knows whether they can be read, or the reverse."""
    sides: dict[str, set[str]] = {}
    for marks in marked_tests().values():
        for feature, *proven in marks:
            sides.setdefault(feature, set()).update(proven)
    assert {feature: found for feature, found in sides.items() if found != set(SIDES)} == {}


def test_marks_say_what_is_proven() -> None:
    """Catches a mark without a side, which would claim nothing and look like a claim."""
    for name, marks in marked_tests().items():
        for feature, *sides in marks:
            assert feature, name
            assert sides, name
            assert set(sides) <= set(SIDES), name
