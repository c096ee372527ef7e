# SPDX-License-Identifier: Apache-2.0
"""Order of the test files over parallel workers: the slowest first, so that no worker ends with a long file alone.

pytest-xdist begins with the files that have most tests. Ours with fewest are the slowest, since their tests start
engines. ``--record-seconds`` writes the seconds of each file, as measured in this run, to ``tests/seconds.json``; files
that are not in it are estimated.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("seconds.json")
SHARING = re.compile(
    r"(tests/server)/(?:test_(?:server(?!_modules|_stock)\w*|openai_example)|hostile/\w+|routes/test_capabilities)\.py"
    r"|(tests/studio)/test_(?:studio|page|mistakes)\.py"
    r"|(tests/peers)/test_(?:inspect|grammar|rhizonymph_server|vllm_lens_server)\.py"
)
"""Files whose tests use a server of the session, and the folder whose ``conftest.py`` starts it."""
QUICK = re.compile(
    r"tests/(?:benchmarks|capture|client|compat|demo|frontend|metrics|models|program|registry|repo|request|taps"
    r"|server/(?:auth|http|quota|routes))/|tests/test_"
)
"""Files whose tests start no engine, with few exceptions."""
SECONDS_WITHOUT_ENGINE, SECONDS_WITH_ENGINE = 0.05, 4.0
"""Estimates for one test of a file that was not measured."""


def group_of(nodeid: str) -> str:
    """Return the file of a test, or the folder for files that share a server: one worker runs them."""
    file = nodeid.partition("::")[0]
    shared = SHARING.fullmatch(file)
    return str(shared[shared.lastindex or 0]) if shared else file


def measured() -> dict[str, float]:
    """Return the recorded seconds of each group."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def slowest_first(nodeids: Sequence[str], seconds: Mapping[str, float]) -> list[int]:
    """Return the indices of the tests, with the slowest groups first."""
    groups = [group_of(nodeid) for nodeid in nodeids]
    costs: Counter[str] = Counter()
    for group, nodeid in zip(groups, nodeids, strict=True):
        costs[group] += SECONDS_WITHOUT_ENGINE if QUICK.match(nodeid) else SECONDS_WITH_ENGINE
    costs.update({group: seconds[group] - costs[group] for group in costs.keys() & seconds.keys()})
    return sorted(range(len(nodeids)), key=lambda index: (-costs[groups[index]], groups[index]))


class SecondsRecord:
    """Plugin that adds up the seconds of each group of tests, and writes the sums of a second or more."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[group_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        found = {group: round(seconds, 1) for group, seconds in self.seconds.items() if seconds >= 1}
        RECORD.write_text(json.dumps(measured() | found, indent=1, sort_keys=True) + "\n")
