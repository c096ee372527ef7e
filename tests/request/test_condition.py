# SPDX-License-Identifier: Apache-2.0
"""Tests of ``when`` and ``stop_on``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vllm_steer import Edit, SteeringError
from vllm_steer.program import compile_program
from vllm_steer.request import Edit as SpecEdit
from vllm_steer.request import parse_readouts, parse_stops

READOUTS = parse_readouts(
    {
        "refusal": {"probe": [1.0, 2.0], "point": "post_block", "layer": 3},
        "topics": {"projections": [[1.0, 2.0]], "point": "post_block", "layer": 3},
    }
)
ABOVE = {"readout": "refusal", "above": 0.5}


def edit(when: Any, **fields: Any) -> SpecEdit:
    return Edit(**{"kind": "add", "point": "post_block", "layers": 4, "vector": [1.0, 0.0], "when": when, **fields})


def test_wire_form_restores_the_edit() -> None:
    """Catches a condition that loses a field in its JSON form."""
    for when in (
        ABOVE,
        {**ABOVE, "window": "latch", "release": {"below": 0.1}},
        {**ABOVE, "window": "previous", "over": "ema", "alpha": 0.2},
        {**ABOVE, "window": "previous", "tokens": 3},
        [{**ABOVE, "window": "prompt", "over": "max", "positions": [[1, 4]]}, {**ABOVE, "sharpness": 3.0}],
    ):
        made = edit(when, live="calm", tokens="generated")
        assert Edit(**made.to_wire()) == made
        assert made != edit(None, tokens="generated")


def test_default_tokens() -> None:
    """Catches a default that covers prompt tokens about which the window cannot decide."""
    assert edit(ABOVE).tokens.to_wire() == "all"
    assert edit({**ABOVE, "window": "previous"}).tokens.to_wire() == "generated"


@pytest.mark.parametrize(
    ("when", "field"),
    [
        ("refusal", "when"),
        ([], "when"),
        ({"above": 1.0}, "when.readout"),
        ({"readout": "refusal"}, "when.above"),
        ({**ABOVE, "below": 0.1}, "when.above"),
        ({**ABOVE, "above": float("inf")}, "when.above"),
        ({**ABOVE, "over": "mean"}, "when.over"),
        ({**ABOVE, "release": {"below": 0.1}}, "when.release"),
        ({**ABOVE, "window": "prompt", "over": "ema", "alpha": 0.5}, "when.over"),
        ({**ABOVE, "window": "previous", "over": "k_of_n"}, "when.over"),
        ({**ABOVE, "window": "previous", "over": "ema"}, "when.alpha"),
        ({**ABOVE, "window": "previous", "over": "ema", "alpha": 1.0}, "when.alpha"),
        ({**ABOVE, "window": "previous", "alpha": 0.5}, "when.alpha"),
        ({**ABOVE, "window": "latch", "tokens": 2}, "when.tokens"),
        ({**ABOVE, "window": "previous", "tokens": 0}, "when.tokens"),
        ({**ABOVE, "window": "previous", "tokens": 2, "over": "max"}, "when.over"),
        ({**ABOVE, "window": "previous", "tokens": 2, "sharpness": 1.0}, "when.sharpness"),
        ({**ABOVE, "window": "latch", "release": {"above": 0.1, "below": 0.2}}, "when.release.above"),
        ({**ABOVE, "window": "latch", "sharpness": 2.0}, "when.sharpness"),
        ({**ABOVE, "sharpness": 0.0}, "when.sharpness"),
        # 0 in float32, which means a step.
        ({**ABOVE, "sharpness": 1e-46}, "when.sharpness"),
        (np.array([1, 2]), "when"),
        ({**ABOVE, "window": "next"}, "when.window"),
        ({**ABOVE, "larger": 1.0}, "when"),
        ([ABOVE, {**ABOVE, "window": 3}], "when[1].window"),
    ],
)
def test_refused(when: Any, field: str) -> None:
    """Catches an invalid condition that is accepted, or reported at another path."""
    with pytest.raises(SteeringError) as refused:
        edit(when)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (edit({"readout": "refusals", "above": 1.0}), "did you mean refusal"),
        (edit({"readout": "topics", "above": 1.0}), "name a readout with one probe"),
        (edit(ABOVE, layers=3), "is computed before the readout"),
        (edit(ABOVE, layers="all"), "is computed before the readout"),
        (edit({**ABOVE, "window": "latch"}, tokens="all"), "generated tokens only"),
    ],
)
def test_refused_with_the_readouts(made: SpecEdit, problem: str) -> None:
    """Catches a condition that cannot be decided."""
    with pytest.raises(SteeringError, match=problem):
        compile_program([made], readouts=READOUTS)


def test_earlier_sites_are_allowed_under_other_windows() -> None:
    """Catches a refusal of an edit whose condition looks at earlier tokens."""
    program = compile_program([edit({**ABOVE, "window": "previous"}, layers="all")], readouts=READOUTS)
    assert program.layout.gates == {0: 3}


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"readout": "refusal", "above": 1.0}, "stop_on"),
        ([], "stop_on"),
        ([{"above": 1.0}], "stop_on[0].readout"),
        ([{**ABOVE, "tokens": 0}], "stop_on[0].tokens"),
        ([ABOVE, {**ABOVE, "window": "latch"}], "stop_on[1]"),
    ],
)
def test_refused_stops(value: Any, field: str) -> None:
    """Catches an invalid stop that is accepted, or reported at another path."""
    with pytest.raises(SteeringError) as refused:
        parse_stops(value)
    assert refused.value.field == field
