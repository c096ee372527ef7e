# SPDX-License-Identifier: Apache-2.0
"""Tests of the ``readouts`` field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vllm_steer import SteeringError
from vllm_steer.program import compile_program
from vllm_steer.request import NamedProjection, Projection, parse_readouts

PROBE = {"probe": [1.0, 2.0], "point": "post_block", "layer": 3}

LENS: dict[str, Any] = {"lens": {"top_k": 2}, "point": "post_block", "layers": "all"}


def test_defaults() -> None:
    """Catches other defaults than an affine probe of generated tokens."""
    readouts = parse_readouts({"refusal": PROBE})
    readout = readouts["refusal"]
    assert (readout.point, readout.layer, readout.positions.to_wire()) == ("post_block", 3, "generated")
    assert isinstance(readout.probe, Projection)
    np.testing.assert_array_equal(readout.probe.directions, [[1.0, 2.0]])
    (compiled,) = compile_program([], readouts=readouts).readouts
    assert (compiled.name, compiled.scalar, compiled.bias, compiled.sigmoid) == ("refusal", True, 0.0, False)


def test_names_of_probes() -> None:
    """Catches a name that is read as a vector."""
    readouts = parse_readouts(
        {
            "a": {**PROBE, "probe": "safety/refusal"},
            "b": {"projections": ["x/y", "x/z"], "point": "pre_attn", "layer": 0},
        }
    )
    one, several = readouts["a"].probe, readouts["b"].projections
    assert isinstance(one, NamedProjection) and isinstance(several, NamedProjection)
    assert [str(each) for each in one.probes] == ["safety/refusal"]
    assert len(several.probes) == 2


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({}, "readouts"),
        ([PROBE], "readouts"),
        ({"a b": PROBE}, "readouts"),
        ({"a": 3}, "readouts.a"),
        ({"a": {**PROBE, "layers": [3]}}, "readouts.a.layers"),
        ({"a": {**PROBE, "projections": [[1.0, 2.0]]}}, "readouts.a"),
        ({"a": {"point": "post_block", "layer": 3}}, "readouts.a"),
        ({"a": {"probe": [1.0], "point": "post_block"}}, "readouts.a.layer"),
        ({"a": {"probe": [1.0], "layer": 3}}, "readouts.a.point"),
        ({"a": {**PROBE, "layer": -1}}, "readouts.a.layer"),
        ({"a": {**PROBE, "bias": float("nan")}}, "readouts.a.bias"),
        ({"a": {**PROBE, "sigmoid": 1}}, "readouts.a.sigmoid"),
        ({"a": {**PROBE, "positions": "first"}}, "readouts.a.positions"),
        ({"a": {**PROBE, "positions": np.array([0, 1])}}, "readouts.a.positions"),
        ({"a": {**PROBE, "probe": [float("inf")]}}, "readouts.a.probe[0]"),
        ({"a": {**PROBE, "probe": "refusal"}}, "readouts.a.probe"),
        ({"a": {"projections": [[1.0]], "bias": 1.0, "point": "post_block", "layer": 3}}, "readouts.a.bias"),
        ({"a": {**PROBE, "layers": "all"}}, "readouts.a.layers"),
        ({"a": {**LENS, "layers": "each"}}, "readouts.a.layers"),
        ({"a": {**LENS, "layer": 1}}, "readouts.a.layer"),
        ({"a": {**LENS, "lens": {"tokens": []}}}, "readouts.a.lens.tokens"),
        ({"a": {**LENS, "lens": {"tokens": "he"}}}, "readouts.a.lens.tokens"),
        ({"a": {**LENS, "lens": {"tokens": ["he"]}}}, "readouts.a.lens.tokens[0]"),
        ({"a": {**LENS, "lens": {"tokens": [3, -1]}}}, "readouts.a.lens.tokens[1]"),
        ({"a": {**LENS, "lens": {"tokens": [3, 3]}}}, "readouts.a.lens.tokens"),
        ({"a": {**LENS, "lens": {"tokens": [3] * 65}}}, "readouts.a.lens.tokens"),
        ({"a": {**LENS, "lens": {"tokens": [3], "top_k": 2}}}, "readouts.a.lens.top_k"),
    ],
)
def test_refused(value: Any, field: str) -> None:
    """Catches an invalid readout that is accepted, or reported at another path."""
    with pytest.raises(SteeringError) as refused:
        parse_readouts(value)
    assert refused.value.field == field


def test_lens_of_all_layers_and_given_tokens() -> None:
    """Catches a number of likeliest tokens beside given ones, and layers that are guessed before the model is known."""
    readouts = parse_readouts({"a": {**LENS, "lens": {"tokens": [7, 2]}}, "b": {**LENS, "lens": {}, "layers": [3]}})
    given, likeliest = compile_program([], readouts=readouts).readouts
    assert (given.targets, given.top_k, given.omitted) == ((7, 2), 2, ("layers",))
    assert (likeliest.targets, likeliest.top_k, likeliest.layers, likeliest.omitted) == ((), 5, (3,), ())


def test_widths_of_one_request_agree() -> None:
    """Catches vectors of two widths in one program."""
    readouts = parse_readouts({"a": PROBE, "b": {**PROBE, "probe": [1.0, 2.0, 3.0]}})
    with pytest.raises(SteeringError, match=r"readouts\.b\.probe: has a vector of width 3"):
        compile_program([], readouts=readouts)


def test_names_of_sites_in_other_libraries():
    """Catches the layer of a name that is dropped, and a contradiction that is resolved silently."""
    readout = parse_readouts({"a": {"probe": [1.0], "point": "layers_output[3]"}})["a"]
    assert (readout.point, readout.layer) == ("post_block", 3)
    with pytest.raises(SteeringError, match="the point names layer 3"):
        parse_readouts({"a": {"probe": [1.0], "point": "layers_output[3]", "layer": 4}})
