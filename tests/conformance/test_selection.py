# SPDX-License-Identifier: Apache-2.0
"""Selection of the rows of a test run: the parts cover all rows."""

from __future__ import annotations

import pytest

from tests.conformance import shard
from tests.conformance.selection import FAMILIES, HAVE_IDENTITIES, HAVE_PARITY, choose, runs_here
from tests.conformance.shard import PARTS, part_of


def test_parts_cover_all_rows() -> None:
    """Catches a row that no part proves, and a family that a part omits."""
    rows = [*HAVE_PARITY, *HAVE_IDENTITIES]
    parts = [{tiny.name for tiny in choose(rows, lambda name, n=n: part_of(name) == n)} for n in range(PARTS)]
    assert set().union(*parts) == {tiny.name for tiny in rows if runs_here(tiny)}
    for found in parts:
        assert found >= set(FAMILIES)
        assert len(found) < len(rows) / 2


def test_part_rotates_with_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that proves the same part at every commit."""
    monkeypatch.delenv("CONFORMANCE_PART", raising=False)
    found = set()
    for commit in ("0000000a", "0000000b"):
        monkeypatch.setattr(shard.subprocess, "run", lambda *_, commit=commit, **__: type("", (), {"stdout": commit})())
        found.add(shard.current_part.__wrapped__())
    assert found == {10 % PARTS, 11 % PARTS}
