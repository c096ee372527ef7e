# SPDX-License-Identifier: Apache-2.0
"""Negative control of the points on the branches: taps in the usual wrong places are told from right ones.

Some of these read right values, or make ``add`` right, so that values, or the simplest edit, would let them pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.branches import BRANCHES, served_branches
from tests.conformance.cases import Case
from tests.conformance.parity import TOLERANCE, examine
from tests.conformance.reference_process import ReferenceProcess
from tests.conformance.zoo import BY_NAME
from tests.wrong_branches import behind_the_stream, copied, other_summand
from vllm_steer.models import install
from vllm_steer.models.recipe import Recipe


def _before_the_post_norm(recipe: Recipe, point: Any, layer: Any) -> str:
    """Return the attention module, whose output a post-norm still changes."""
    return "self_attn" if point == "attn_out" else recipe.location(point, layer)


@dataclass(frozen=True)
class Wrong:
    """``wrong`` in the place of ``replaces``; ``points`` come out wrong, in rows or under edits."""

    model: str
    replaces: str
    wrong: Any
    points: tuple[str, ...]
    in_rows: bool = True

    def __str__(self) -> str:
        return f"{self.model}-{self.wrong.__name__.strip('_')}"


WRONG = (
    Wrong("llama", "_with_branch", other_summand, ("attn_out", "mlp_out")),
    Wrong("llama", "_with_branch", behind_the_stream, ("attn_out", "mlp_out"), in_rows=False),
    Wrong("gpt2", "_tap_output", copied, BRANCHES, in_rows=False),
    Wrong("exaone4", "_location", _before_the_post_norm, ("attn_out",)),
)


def _is_asked(case: Case) -> bool:
    return not case.edits or (len(case.edits) == 1 and bool(case.points & set(BRANCHES))) or len(case.points) > 3


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_taps_on_the_branches_are_told_from_right_ones(
    wrong: Wrong, monkeypatch: pytest.MonkeyPatch, reference_process: ReferenceProcess, zoo_folder: Path
) -> None:
    """Catches a comparison that would pass them; plain requests must not be accused."""
    monkeypatch.setattr(install, wrong.replaces, wrong.wrong)
    tiny = BY_NAME[wrong.model]
    report = examine(tiny, "eager", zoo_folder, reference_process, keep=_is_asked)
    plain = [outcome for outcome in report.outcomes if not outcome.case.edits]
    assert plain and all(outcome.agrees for outcome in plain)
    for point in set(served_branches(tiny)):
        edited = [o for o in report.outcomes if point in o.case.points]
        seen = [max(o.error, *o.value_errors.values()) > 10 * TOLERANCE for o in edited]
        assert edited and (all(seen) if point in wrong.points else True), point
        rows = [outcome.value_errors[point] > 10 * TOLERANCE for outcome in plain]
        assert all(rows) if wrong.in_rows and point in wrong.points else not any(rows), point
