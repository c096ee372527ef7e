# SPDX-License-Identifier: Apache-2.0
"""Doses of registered modules, and what is reported about them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.registry.modules import content, registry, vector
from tests.registry.test_composer import extra, program_with
from vllm_steer import Edit, SteeringError
from vllm_steer.params import APPLIED_KEY, PROGRAM_KEY
from vllm_steer.program import Program
from vllm_steer.registry.composer import find_vector
from vllm_steer.registry.index import decode_index, encode_index
from vllm_steer.registry.registry import SteeringRegistry
from vllm_steer.registry.schema import SteeringApplied
from vllm_steer.request.references import parse_reference


def dosed(**about: str) -> tuple[SteeringRegistry, dict[str, Any]]:
    base = {"post_block": {1: {"vector": vector(1), "scale": -2.0}, 0: vector(0)}}
    steering = registry()
    steering.register("calm", base=base, provenance=about)
    return steering, base


def test_a_dose_is_the_same_at_each_layer_of_a_module() -> None:
    """Catches a dose taken for a scale, the length of another layer, and the module's own scale or sign dropped."""
    steering, _ = dosed(stream='{"0": 3.0, "1": 5.0}')
    composed = steering.compose(extra(steering_modules=[{"module": "calm", "dose": 0.5}]))
    program, streams = Program.from_bytes(composed[PROGRAM_KEY]), {0: 3.0, 1: 5.0}
    assert [edit.layers for edit in program.edits] == [(0,), (1,)]
    for edit, (layer, sign) in zip(program.edits, ((0, 1), (1, -1)), strict=True):
        added = edit.strength * program.vector(edit.vectors[0])
        np.testing.assert_allclose(
            added, sign * 0.5 * streams[layer] * vector(layer) / np.linalg.norm(vector(layer)), rtol=1e-5
        )
    (use,) = SteeringApplied.model_validate_json(composed[APPLIED_KEY], strict=True).modules
    assert (use.scale, use.dose, len(use.scales)) == (1.0, 0.5, 2)
    by_hand = {"post_block": {n: {"vector": vector(n), "scale": edit.strength} for n, edit in enumerate(program.edits)}}
    assert program_with(steering, steering_vectors=by_hand).edits == program.edits
    idle = steering.compose(extra(steering_modules=[{"module": "calm", "dose": 0}]))
    assert not Program.from_bytes(idle[PROGRAM_KEY]).edits and b"zero_strength" in idle[APPLIED_KEY]


def test_a_digest_has_no_dose() -> None:
    """Catches a dose by the length that another name of the same vectors tells."""
    steering, base = dosed(stream='{"0": 3.0, "1": 5.0}')
    steering.register("copy", base=base, provenance={"stream": '{"0": 300.0, "1": 500.0}'})
    digest = steering.snapshot().find(parse_reference("calm", ""), "")[0].digest
    named = program_with(steering, steering_modules=[{"module": f"calm@{digest}", "dose": 0.5}])
    assert named.edits == program_with(steering, steering_modules=[{"module": "calm", "dose": 0.5}]).edits
    with pytest.raises(SteeringError, match="needs the name of the module"):
        steering.compose(extra(steering_modules=[{"module": digest, "dose": 0.5}]))
    with pytest.raises(SteeringError, match="needs the name of the module"):
        find_vector(digest, steering.snapshot(), "vector", dosed=True)
    assert find_vector(digest, steering.snapshot(), "vector", dosed=False)


def test_modules_tell_what_a_dose_means() -> None:
    """Catches a strength that adds another dose than 1, and a list of modules that fails because of one of them."""
    steering, _ = dosed(stream='{"0": 3.0, "1": 5.0, "2": 7.0}')
    steering.register("other", **content(), provenance={"stream": '{"0": 3.0}'})
    steering.register("short", base={"post_block": {0: 1e-40 * vector(0)}}, provenance={"stream": '{"0": 3.0}'})
    calm, other, short = steering.list().data
    assert other.streams == short.streams == []
    assert [(each.point, each.layer, each.length) for each in calm.streams] == [
        ("post_block", 0, 3),
        ("post_block", 1, 5),
    ]
    one = SteeringApplied.model_validate_json(
        steering.compose(extra(steering_modules=[{"module": "calm", "dose": 1}]))[APPLIED_KEY]
    )
    assert tuple(each.strength for each in calm.streams) == one.modules[0].scales


def test_global_steering_keeps_the_lengths_of_its_doses() -> None:
    """Catches a dose that changes or is lost when the module's metadata changes or its name is deleted."""
    steering, base = dosed(stream='{"0": 3.0, "1": 5.0}')
    first = steering.set(modules=[{"module": "calm", "dose": 0.5}])
    before = program_with(steering).edits
    assert before and (first.modules[0].dose, first.digest) == (0.5, steering.snapshot().steering_digest)
    steering.register("calm", base=base, provenance={"stream": '{"0": 9.0, "1": 9.0}'})
    steering.delete("calm")
    assert program_with(steering).edits == before
    index = steering.snapshot().index
    assert decode_index(encode_index(index, 0)) == index
    dosed_again, _ = dosed(stream='{"0": 9.0, "1": 9.0}')
    assert dosed_again.set(modules=[{"module": "calm", "dose": 0.5}]).digest != first.digest


def test_doses_without_lengths_are_refused() -> None:
    """Catches a module that is added at an arbitrary strength because its provenance has no number for a layer."""
    use = [{"module": "calm", "dose": 0.5}]
    for stream in ("{}", '{"0": 3.0}'):
        with pytest.raises(SteeringError, match=r"does not tell; use a vector of a file made with .*vllm-steer make"):
            dosed(stream=stream)[0].compose(extra(steering_modules=use))
    steering, _ = dosed(stream='{"0": 3.0, "1": 5.0}')
    with pytest.raises(SteeringError, match=r"steering_modules\[0\].dose: a dose must be between -1000 and 1000"):
        steering.compose(extra(steering_modules=[{"module": "calm", "dose": 3e38}]))
    with pytest.raises(SteeringError, match=r"steering_modules\[0\]: scale must be finite and at most"):
        steering.compose(extra(steering_modules=[["calm", 3e38]]))
    steering.register("calm", **content())
    with pytest.raises(SteeringError, match=r"steering_modules\[0\]: calm is a module with other edits than vectors"):
        steering.compose(extra(steering_modules=use))
    steering.register("calm", decode={"post_block": {1: vector(1)}})
    with pytest.raises(
        SteeringError, match=r"steering_modules\[0\]: calm has .* decode; .* such as 0.2 calm@generated, or"
    ):
        steering.compose(extra(steering_modules=use))


def test_a_dose_whose_strength_overflows_is_refused() -> None:
    """Catches global steering that is accepted, and that fails each request after it."""
    steering, direction = registry(), vector(1) / np.linalg.norm(vector(1))
    base = {"post_block": {1: {"vector": 1e-36 * direction, "scale": 1e36}}}
    steering.register("calm", base=base, provenance={"stream": '{"1": 5.0}'})
    epoch = steering.snapshot().epoch
    with pytest.raises(SteeringError, match=r"^modules\[0\]\.strength"):
        steering.set(modules=[{"module": "calm", "dose": 900}])
    assert steering.snapshot().epoch == epoch
    assert program_with(steering, steering_modules=[{"module": "calm", "dose": 0.5}]).edits


@pytest.mark.parametrize("use", [["calm", 1e-50], {"module": "calm", "dose": 1e-60}, ["calm", 0]])
def test_a_strength_that_float32_rounds_to_zero_has_no_effect(use: Any) -> None:
    """Catches a request that is called steered although each of its strengths is 0 where edits are computed."""
    steering, _ = dosed(stream='{"0": 3.0, "1": 5.0}')
    edit = {"kind": "add", "point": "post_block", "layers": 1, "vector": vector(1), "strength": 1e-50}
    composed = steering.compose(extra(steering_modules=[use, "calm"], steering=[edit, {**edit, "strength": 1e-40}]))
    assert len(Program.from_bytes(composed[PROGRAM_KEY]).edits) == 3
    applied = SteeringApplied.model_validate_json(composed[APPLIED_KEY], strict=True)
    assert [(each.edit, each.reason) for each in applied.no_effect] == [
        ("steering[0]", "zero_strength"),
        ("steering_modules[0]", "zero_strength"),
    ]


def test_modules_of_probes_do_not_steer() -> None:
    """Catches a module without vectors that leaves a request plain, and an error that speaks of other edits."""
    steering = registry()
    steering.register("risk", probes={"lie": vector(1)})
    problem = r'risk has probes and no vectors; name a probe in readouts or as {"module": "risk/lie"} in an edit'
    for use in ("risk", ["risk", 2.0], {"module": "risk", "dose": 1}):
        with pytest.raises(SteeringError, match=rf"steering_modules\[0\]: {problem}"):
            steering.compose(extra(steering_modules=[use]))
        with pytest.raises(SteeringError, match=rf"modules\[0\]: {problem}"):
            steering.set(modules=[use])
    with pytest.raises(SteeringError, match=f"vector: {problem}"):
        find_vector("risk", steering.snapshot(), "vector", dosed=False)


def test_doses_of_edits_are_reported() -> None:
    """Catches a dose that an answer does not show, and a strength that is shown as a dose."""
    steering, _ = dosed(stream='{"0": 3.0, "1": 5.0}')
    calm = find_vector("calm", steering.snapshot(), "vector", dosed=True)
    edit = {"kind": "add", "point": "post_block", "layers": 1, "vector": calm}
    composed = steering.compose(extra(steering=[{**edit, "strength": 2.0}, {**edit, "dose": -0.25}]))
    assert SteeringApplied.model_validate_json(composed[APPLIED_KEY], strict=True).doses == {"steering[1]": -0.25}
    plain = steering.compose(extra(steering=[{**edit, "strength": 2.0}]))
    assert b"doses" not in plain[APPLIED_KEY]


@pytest.mark.parametrize("length", [1e-30, 1e-42, 1e25])
def test_doses_of_very_short_and_long_vectors(length: float) -> None:
    """Catches a norm that underflows or overflows in float32, and with it the dose."""
    steering, direction = registry(), vector(1) / np.linalg.norm(vector(1))
    probe = {"weights": direction * length, "point": "post_block", "layer": 1}
    base = {"post_block": {1: direction * min(length, 1e18)}}
    steering.register("calm", base=base, probes={"p": probe}, provenance={"stream": '{"1": 1e-4}'})
    for name in ("calm", "calm/p"):
        found = find_vector(name, steering.snapshot(), "vector", dosed=True)
        edit = Edit("add", point="post_block", layers=1, vector=found, dose=0.5)
        np.testing.assert_allclose(edit.strength * edit.vector.astype(float), 5e-5 * direction, rtol=1e-2, atol=1e-7)
