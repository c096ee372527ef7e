# SPDX-License-Identifier: Apache-2.0
"""Joined and scaled programs against programs compiled from the same edits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.registry.modules import CAPABILITIES
from vllm_steer.errors import SteeringError
from vllm_steer.program import Program, compile_program, join, resolve, scaled, with_source
from vllm_steer.program.bind import bind_names
from vllm_steer.request import CaptureSpec, Edit, parse_readouts
from vllm_steer.request.probe import Probe


def edit(seed: int, strength: float = 1.0, **changes: Any) -> Edit:
    vector = np.random.default_rng(seed).standard_normal(4)
    fields: dict[str, Any] = {"kind": ("add", "ablate", "clamp")[seed % 3], "point": "pre_attn", "layers": seed}
    if fields["kind"] == "clamp":
        fields["low"] = 0.5
    return Edit(**{"vector": vector, "strength": strength, **fields, **changes})


READS = [CaptureSpec(hooks={"pre_attn": [1]}), CaptureSpec(hooks={"pre_attn": [1], "post_block": "all"})]
parts = st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=4)


@given(parts, st.lists(st.sampled_from([0, 1]), max_size=2))
def test_join_equals_compiling_all_edits(seeds: list[list[int]], reads: list[int]) -> None:
    """Catches a changed order, an edit with another edit's vector, and reads that are lost or duplicated."""
    programs = [compile_program([edit(seed) for seed in part], [READS[i] for i in reads]) for part in seeds]
    whole = compile_program([edit(seed) for part in seeds for seed in part], [READS[i] for i in reads])
    assert join(programs) == whole
    assert Program.from_bytes(join(programs).to_bytes()) == whole


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sampled_from([1.0, -2.0, 0.5, 0.0]))
def test_scaled_equals_compiling_scaled_edits(seeds: list[int], scale: float) -> None:
    """Catches a digest of the unscaled edit: requests would share table rows and cached blocks."""
    found = scaled(compile_program([edit(seed, 3.0) for seed in seeds]), scale)
    wanted = compile_program([edit(seed, 3.0 * scale) for seed in seeds])
    assert found.edits == wanted.edits
    assert Program.from_bytes(found.to_bytes()) == found


def test_rejects_mixed_widths_and_overflow() -> None:
    """Catches vectors of two widths in one program, and strengths that are infinite in float32."""
    wide = compile_program([edit(0, vector=np.ones(5))])
    narrow = with_source(compile_program([edit(0)]), "modules[0]")
    projection = {"directions": [[1.0] * 5]}
    paths = ["capture.logging", "capture.memory"]
    specs = [CaptureSpec(hooks={"pre_attn": [1]}), CaptureSpec(hooks={"pre_attn": [1]}, reduce=projection)]
    reading = compile_program([], specs, capture_paths=paths)
    for other, path in ((wide, "steering"), (reading, "capture.memory.reduce.directions")):
        with pytest.raises(SteeringError) as caught:
            join([narrow, other])
        assert str(caught.value).startswith(f"{path}: has a vector of width 5, but modules[0] has width 4;")
    with pytest.raises(SteeringError) as caught:
        compile_program([edit(0)], specs, edit_paths=["steering[0]"], capture_paths=paths)
    assert caught.value.field == "capture.memory.reduce.directions"
    with pytest.raises(SteeringError, match="hidden size") as caught:
        CAPABILITIES.check(reading, None)
    assert caught.value.field == "capture.memory.reduce.directions"
    with pytest.raises(SteeringError, match="scale"):
        scaled(compile_program([edit(0, 1e38)]), 10.0)
    assert join([wide, compile_program([])]) == wide


def test_sources_follow_their_edits_and_reads() -> None:
    """Catches an error that names the field of another edit after joining, scaling or dropping reads."""
    off = compile_program([edit(0, strength=0.0), edit(1), edit(2, 1e-30)], edit_paths=["a", "b", "c"])
    assert off.sources == ("b", "c")
    assert scaled(off, 1e-40).sources == ("b",) and scaled(off, 2.0).sources == ("b", "c")
    read = compile_program([edit(3)], READS, edit_paths=["d"], capture_paths=["capture.x", "capture.y"])
    whole = join([with_source(off, "modules[0]"), read, compile_program([edit(4)])])
    assert [whole.edit_source(i) for i in range(4)] == ["modules[0]", "modules[0]", "d", "steering"]
    assert [whole.capture_source(i) for i in range(2)] == ["capture.x", "capture.y"]
    assert whole.without_captures().sources == whole.sources[:4]
    assert Program.from_bytes(whole.to_bytes()).sources == whole.sources
    assert whole.edits == join([off, read, compile_program([edit(4)])]).edits, "sources are not content"
    late = compile_program([edit(0), edit(1, tokens=[-9])], edit_paths=["steering[0]", "steering[1]"])
    with pytest.raises(SteeringError) as raised:
        resolve(late, 3, 8)
    assert raised.value.field == "steering[1].tokens"


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-22, 1.0, 1e18])
@pytest.mark.parametrize("named", [False, True])
def test_a_cosine_has_a_unit_vector_of_its_own(scale: float, named: bool) -> None:
    """Catches weights whose norm underflows on the device, and a unit vector in a product or an edit of the weights."""
    weights = (scale * np.random.default_rng(1).standard_normal(4)).astype("f4")
    fields = {"probe": "module/p" if named else weights, "point": "post_block", "layer": 1}
    readouts = parse_readouts({"cosine": {**fields, "cosine": True}, "product": fields})
    names: Any = SimpleNamespace(probe=lambda *_: Probe(weights=weights))
    program = bind_names(compile_program([edit(0, vector=weights)], readouts=readouts), names)
    wide = weights.astype(np.float64)
    unit = (wide / (np.linalg.norm(wide) or 1.0)).astype("f4")
    joined = join([compile_program([edit(1)]), program])
    for each in (program, Program.from_bytes(program.to_bytes()), joined):
        used = (*each.readouts, each.edits[-1])
        for part, expected in zip(used, (unit, weights, weights), strict=True):
            np.testing.assert_array_equal(each.vector(part.vectors[0]), expected)
