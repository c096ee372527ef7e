# SPDX-License-Identifier: Apache-2.0
"""Tests of the comparison of sweeps in ``benchmarks/patching.py``."""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks.patching import BATCH, CHECKED, GROUPS, prompts_of, summarise, too_far


def test_ratios_are_those_of_one_round() -> None:
    """Catches ratios of medians, which compare runs under different load."""
    rounds = [{"hooks": 10.0, "study": 20.0}, {"hooks": 1.0, "study": 3.0}, {"hooks": 5.0, "study": 5.0}]
    found = summarise(rounds, "hooks")
    assert found["study"] == {"cells_per_second": 5.0, "ratio": [2.0, 1.0, 3.0]}
    assert found["hooks"]["ratio"] == [1.0, 1.0, 1.0]


def test_prompts_share_no_cached_block() -> None:
    """Catches a round that finds the blocks of an earlier one, which measures the cache instead of the sweep."""
    seen = [prompts_of(number, way, 64) for number, way in product(range(3), range(3))]
    starts = {tuple(prompt[:8]) for pair in seen for prompt in pair}
    assert len(starts) == 2 * len(seen)
    assert all(clean[8:] == corrupt[8:] for clean, corrupt in seen)


@pytest.mark.parametrize("name", GROUPS)
def test_groups_fill_their_batches(name: str) -> None:
    """Catches a group whose sweeps are smaller than a batch of the loop or than the checked part."""
    group = GROUPS[name]
    assert group.prompt_tokens % BATCH == 0 and group.prompt_tokens >= CHECKED
    assert group.engine["max_model_len"] > group.prompt_tokens


def test_distances_are_judged_by_the_rounding_of_the_hooks() -> None:
    """Catches grids that differ from the hooks, and a limit below the rounding of the hooks themselves."""
    measured = {"batched": 0.445, "requests": 0.646, "study": 0.766}
    assert too_far(measured, "batched", 0.6) == {}
    assert too_far({**measured, "study": 1.4}, "batched", 0.6) == {"study": 1.4}
    assert too_far({"batched": 1.0, "study": 2.0}, "batched", 0.6) == {"batched": 1.0}
    assert list(too_far({"batched": 0.0, "study": float("nan")}, "batched", 1e-4)) == ["study"]
    assert too_far({"batched": 1e-6, "study": 2e-4}, "batched", 1e-4) == {"study": 2e-4}
