# SPDX-License-Identifier: Apache-2.0
"""Negative controls of the points on the branches: the comparison rejects taps in the usual wrong places.

Some of these taps read right values, or make ``add`` right, so values alone, or the simplest edit, would not suffice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.branches import BRANCHES, supported_branches
from tests.conformance.cases import Case
from tests.conformance.parity import TOLERANCE, examine
from tests.conformance.reference_process import ReferenceProcess
from tests.conformance.zoo import BY_NAME
from tests.wrong_taps import after_the_stream, copied_output, other_summand
from vllm_steer.models import install
from vllm_steer.models.recipe import Recipe


def before_the_post_norm(recipe: Recipe, point: Any, layer: Any) -> str:
    """Replace ``_location``: the attention module, whose output a post-norm still changes."""
    return "self_attn" if point == "attn_out" else recipe.location(point, layer)


@dataclass(frozen=True)
class WrongBranch:
    """``wrong`` replaces a function of ``install`` and spoils ``points``: their edits and, if ``in_rows``, rows."""

    model: str
    replaces: str
    wrong: Any
    points: tuple[str, ...]
    in_rows: bool = True

    def __str__(self) -> str:
        return f"{self.model}-{self.wrong.__name__}"


WRONG = (
    WrongBranch("llama", "_with_branch", other_summand, ("attn_out", "mlp_out")),
    WrongBranch("llama", "_with_branch", after_the_stream, ("attn_out", "mlp_out"), in_rows=False),
    WrongBranch("gpt2", "_tap_output", copied_output, BRANCHES, in_rows=False),
    WrongBranch("exaone4", "_location", before_the_post_norm, ("attn_out",)),
)


def _is_relevant(case: Case) -> bool:
    return not case.edits or (len(case.edits) == 1 and bool(case.points & set(BRANCHES))) or len(case.points) > 3


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_rejects_wrong_taps_on_the_branches(
    wrong: WrongBranch, monkeypatch: pytest.MonkeyPatch, reference_process: ReferenceProcess, zoo_folder: Path
) -> None:
    """Catches a comparison that accepts a wrong tap, or that rejects plain requests."""
    monkeypatch.setattr(install, wrong.replaces, wrong.wrong)
    tiny = BY_NAME[wrong.model]
    report = examine(tiny, "eager", zoo_folder, reference_process, keep=_is_relevant)
    plain = [outcome for outcome in report.outcomes if not outcome.case.edits]
    assert plain and all(outcome.agrees for outcome in plain)
    for point in supported_branches(tiny):
        spoiled = point in wrong.points
        edited = [o for o in report.outcomes if point in o.case.points]
        assert edited, point
        if spoiled:
            assert all(max(o.error, *o.value_errors.values()) > 10 * TOLERANCE for o in edited), point
        wrong_rows = [outcome.value_errors[point] > 10 * TOLERANCE for outcome in plain]
        assert all(wrong_rows) if wrong.in_rows and spoiled else not any(wrong_rows), point
