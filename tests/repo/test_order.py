# SPDX-License-Identifier: Apache-2.0
"""Tests of the order in which parallel workers get the files of the suite."""

from tests.order import group_of, measured, slowest_first
from tests.repo.tree import ROOT

QUICK = [f"tests/request/test_edit.py::test_{number}" for number in range(20)]
ENGINE = ["tests/engine/test_cache.py::test_blocks"]
SERVER = ["tests/server/test_server.py::test_one", "tests/server/hostile/test_fields.py::test_two"]


def order(nodeids: list[str], seconds: dict[str, float]) -> list[str]:
    return list(dict.fromkeys(group_of(nodeids[index]) for index in slowest_first(nodeids, seconds)))


def test_files_that_start_engines_come_first() -> None:
    """Catches the order by number of tests, which leaves an engine's file of minutes to the end of the run."""
    assert order(QUICK + ENGINE + SERVER, {}) == ["tests/server", "tests/engine/test_cache.py", group_of(QUICK[0])]


def test_measured_seconds_replace_the_estimate() -> None:
    """Catches a record that is ignored, and one that is added to the estimate."""
    assert order(QUICK + ENGINE, {group_of(QUICK[0]): 5.0})[0] == group_of(QUICK[0])
    assert order(QUICK + ENGINE, {group_of(QUICK[0]): 5.0, group_of(ENGINE[0]): 6.0})[0] == group_of(ENGINE[0])


def test_tests_of_a_file_keep_their_order() -> None:
    """Catches an order of single tests, with which a worker would build the fixtures of a file again."""
    assert slowest_first(QUICK, {}) == list(range(len(QUICK)))


def test_recorded_files_exist() -> None:
    """Catches a record of files that are gone."""
    assert [group for group in measured() if not (ROOT / group).exists()] == []
