# SPDX-License-Identifier: Apache-2.0
"""Tests of the comparison of seams between versions of vLLM."""

from __future__ import annotations

import json

import pytest

from scripts.seams import dump
from vllm_steer.compat.seam_digests import SeamSource, changes, read_seam, read_seams, recorded
from vllm_steer.compat.seams import SEAMS, Kind, Seam
from vllm_steer.compat.sources import SourceTree, installed_version

PATH = "vllm.v1.core.sched.scheduler:Scheduler"
SEAM = Seam(f"{PATH}.schedule", Kind.OVERRIDE, "test", "x:y")
OLD = (
    "class Scheduler(Base):\n    size: int = 1\n"
    "    def __init__(self, a): ...\n    def schedule(self, x=1):\n        return x"
)


def source_of(text: str, seam: Seam = SEAM) -> SeamSource | None:
    return read_seam(SourceTree({"vllm/v1/core/sched/scheduler.py": text}, "9.9"), seam)


@pytest.mark.parametrize(
    ("old", "new", "summary"),
    [
        ("        return x", "        return x + 1", "source"),
        ("x=1", "x=2", "signature"),
        ("x=1", "x=1, *args", "signature"),
        ("def schedule", "def plan", "gone"),
    ],
)
def test_finds_changes(old: str, new: str, summary: str) -> None:
    """Catches a changed method that counts as unchanged."""
    (change,) = changes({SEAM.path: source_of(OLD)}, {SEAM.path: source_of(OLD.replace(old, new))})
    assert (change.seam.path, change.summary) == (SEAM.path, summary)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        return x", "        # why\n        return x"),
        ("        return x", "        '''Docstring.'''\n        return x"),
        ("x=1", "x: int = 1"),
        ("self, a", "self, a, b"),
    ],
)
def test_ignores_what_does_not_run(old: str, new: str) -> None:
    """Catches a refused release in which only comments, docstrings, annotations or other methods changed."""
    assert source_of(OLD) is not None
    assert changes({SEAM.path: source_of(OLD)}, {SEAM.path: source_of(OLD.replace(old, new))}) == []


@pytest.mark.parametrize(
    ("old", "new"), [("Base", "Other"), ("size: int = 1", "size: int = 2"), ("self, a", "self, b")]
)
def test_a_class_counts_with_its_header(old: str, new: str) -> None:
    """Catches a changed field, base class or constructor of a class that we subclass or create."""
    seam = Seam(PATH, Kind.IMPORT, "test")
    before, after = source_of(OLD, seam), source_of(OLD.replace(old, new), seam)
    assert len(changes({PATH: before}, {PATH: after})) == 1
    assert changes({PATH: before}, {PATH: source_of(OLD.replace("return x", "return 2"), seam)}) == []


def test_the_record_groups_equal_versions() -> None:
    """Catches a record that loses a version, or a missing seam."""
    path = SEAMS[0].path
    one, other = SeamSource("self", "aa"), SeamSource("self, x", "bb")
    table = {"1": {path: one}, "2": {path: one}, "3": {path: other}, "4": {path: None}}
    assert json.loads(dump(table))[path] == [
        {"versions": ["1", "2"], "signature": "self", "digest": "aa"},
        {"versions": ["3"], "signature": "self, x", "digest": "bb"},
        {"versions": ["4"]},
    ]


def test_recorded_versions_are_complete() -> None:
    """Catches a seam that was added to the table and not recorded for every version."""
    paths = {seam.path for seam in SEAMS}
    assert installed_version() in recorded()
    assert {version: paths ^ found.keys() for version, found in recorded().items() if paths != found.keys()} == {}


def test_an_empty_tree_has_no_seams() -> None:
    """Negative control: nothing is found where nothing is."""
    assert set(read_seams(SourceTree({"vllm/__init__.py": ""}, "9.9")).values()) - {SeamSource("", "")} == {None}
