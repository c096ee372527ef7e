# SPDX-License-Identifier: Apache-2.0
"""The feature table matches the `feature` marks in the tests, and all of those tests passed."""

from __future__ import annotations

import json

from tests.features import RECORD, SIDES, marked_tests

UPDATE = "python -m pytest -m feature --features benchmarks/results/features.json"


def test_recorded_features_match_the_marks() -> None:
    """Catches a listed feature whose test was deleted, and a tested feature that is not listed."""
    recorded = {name: entry["features"] for name, entry in json.loads(RECORD.read_text()).items()}
    assert recorded == marked_tests(), UPDATE


def test_recorded_tests_passed() -> None:
    """Catches a table generated from failing tests. Skipped tests need a GPU; the table marks them."""
    failed = [name for name, entry in json.loads(RECORD.read_text()).items() if entry["outcome"] == "failed"]
    assert not failed, UPDATE


def test_features_are_tested_for_steering_and_capture() -> None:
    """Catches a feature that is tested with steering but not with capture, or the reverse."""
    sides: dict[str, set[str]] = {}
    for marks in marked_tests().values():
        for feature, *proven in marks:
            sides.setdefault(feature, set()).update(proven)
    assert {feature: found for feature, found in sides.items() if not found >= set(SIDES[:2])} == {}


def test_marks_name_a_feature_and_a_side() -> None:
    """Catches a mark without a side, which would not appear in the table."""
    for name, marks in marked_tests().items():
        for feature, *sides in marks:
            assert feature, name
            assert sides, name
            assert set(sides) <= set(SIDES), name
