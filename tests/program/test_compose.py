# SPDX-License-Identifier: Apache-2.0
"""Programs out of programs are those of their edits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_steer.errors import SteeringError
from vllm_steer.program import Program, compile_program, join, scaled
from vllm_steer.spec import CaptureSpec, Edit


def edit(seed: int, strength: float = 1.0, **changes: Any) -> Edit:
    vector = np.random.default_rng(seed).standard_normal(4)
    fields: dict[str, Any] = {"kind": ("add", "ablate", "clamp")[seed % 3], "point": "pre_attn", "layers": seed}
    if fields["kind"] == "clamp":
        fields["low"] = 0.5
    return Edit(**{"vector": vector, "strength": strength, **fields, **changes})


READS = [CaptureSpec(hooks={"pre_attn": [1]}), CaptureSpec(hooks={"pre_attn": [1], "post_block": "all"})]
parts = st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=4)


@given(parts, st.lists(st.sampled_from([0, 1]), max_size=2))
def test_joined_programs_are_the_program_of_all_edits(seeds: list[list[int]], reads: list[int]) -> None:
    """Catches an order that is lost, a step that takes another's vector, a read that is there twice or not at all."""
    programs = [compile_program([edit(seed) for seed in part], [READS[i] for i in reads]) for part in seeds]
    whole = compile_program([edit(seed) for part in seeds for seed in part], [READS[i] for i in reads])
    assert join(programs) == whole
    assert Program.from_bytes(join(programs).to_bytes()) == whole


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sampled_from([1.0, -2.0, 0.5, 0.0]))
def test_a_scaled_program_is_that_of_scaled_edits(seeds: list[int], scale: float) -> None:
    """Catches a digest that is still that of the other strength: requests would share rows and cached blocks."""
    found = scaled(compile_program([edit(seed, 3.0) for seed in seeds]), scale)
    wanted = compile_program([edit(seed, 3.0 * scale) for seed in seeds])
    assert found.edits == wanted.edits
    assert Program.from_bytes(found.to_bytes()) == found


def test_what_does_not_go_together() -> None:
    """Catches vectors of two widths in one program, and a strength that is infinite on the device."""
    wide = compile_program([edit(0, vector=np.ones(5))])
    with pytest.raises(SteeringError, match="4, 5"):
        join([compile_program([edit(0)]), wide])
    with pytest.raises(SteeringError, match="scale"):
        scaled(compile_program([edit(0, 1e38)]), 10.0)
    assert join([wide, compile_program([])]) == wide
