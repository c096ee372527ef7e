# SPDX-License-Identifier: Apache-2.0
"""Declared request fields: one type decodes, checks, is the wire form and yields the JSON Schema."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import jsonschema
import numpy as np
import pytest

from vllm_steer import SteeringError
from vllm_steer.request import field_types
from vllm_steer.request.condition import Condition, Stop
from vllm_steer.request.field_types import json_schema, read
from vllm_steer.request.readout import parse_readouts

ABOVE = {"readout": "refusal", "above": 0.5}
CONDITIONS: list[dict[str, Any]] = [
    {**ABOVE, "sharpness": 2.5},
    {**ABOVE, "window": "latch", "release": {"below": 0.25}},
    {**ABOVE, "window": "prompt", "over": "max", "positions": [[1, 4]]},
    {**ABOVE, "window": "previous", "tokens": 3, "positions": {"between": [3, "<x>"]}},
]


@pytest.mark.parametrize("value", CONDITIONS)
def test_the_wire_form_is_the_declaration(value: dict[str, Any]) -> None:
    """Catches a field that is lost or has another name on the way, and a form that the JSON Schema does not allow."""
    made = read(Condition, value, "when")
    assert made.to_wire() == value
    assert read(Condition, made.to_wire(), "when") == made and hash(made) == hash(read(Condition, value, "when"))
    assert jsonschema.Draft202012Validator(json_schema(Condition)).is_valid(made.to_wire())


def test_correct_values_are_read_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a loop over the fields of each correct condition."""
    monkeypatch.setattr(field_types, "_read_fields", lambda *_: pytest.fail("the fields were read one by one"))
    for value in CONDITIONS:
        read(Condition, value, "when")


def test_types_are_inspected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches annotations that are evaluated for every probe that is a numpy array, which takes milliseconds."""
    readouts = {"r": {"probe": np.ones(4, dtype=np.float32), "point": "post_block", "layer": 1}}
    parse_readouts(readouts)
    monkeypatch.setattr(field_types.msgspec.structs, "fields", lambda _: pytest.fail("a type was inspected again"))
    parse_readouts(readouts)


def test_numpy_numbers_are_python_numbers() -> None:
    """Catches a numpy number that is refused, or kept and then not equal on the wire."""
    numbers = {"readout": "r", "above": np.float32(0.5), "window": "latch", "release": {"below": np.float64(0.25)}}
    made = read(Condition, numbers, "when")
    assert type(made.above) is float and made.release is not None and type(made.release.below) is float
    assert type(read(Stop, {**ABOVE, "tokens": np.int64(2)}, "stop").tokens) is int


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"readout": "r", "above": 1.0, "release": {"below": "x"}, "window": "latch"}, "when.release.below"),
        ({"readout": "r", "above": 1.0, "window": "\ud800"}, "when.window"),
        ({"readout": "r", "above": 1.0, "positions": [1, "x"]}, "when.positions[1]"),
        ({"readout": "r", "above": float("nan")}, "when.above"),
        ({1: 2}, "when"),
        (MappingProxyType({**ABOVE, "windw": "latch"}), "when"),
        ({**ABOVE, "window": "latch", "release": MappingProxyType({"below": 0.1, "x": 1})}, "when.release"),
        ({**ABOVE, "window": "latch", "release": np.array([1.0])}, "when.release"),
        ({f"k{i}": 1 for i in range(10**5)}, "when"),
    ],
)
def test_paths(value: dict[Any, Any], field: str) -> None:
    """Catches an invalid value at another path, and a key or an array that msgspec alone would ignore."""
    with pytest.raises(SteeringError) as refused:
        read(Condition, value, "when")
    assert refused.value.field == field


@pytest.mark.parametrize("lens", [np.array([1, 2]), range(3), MappingProxyType({"topk": 5}), True])
def test_a_lens_is_a_dict(lens: Any) -> None:
    """Catches an array or a misspelt key that becomes a lens with the defaults."""
    with pytest.raises(SteeringError) as refused:
        parse_readouts({"a": {"lens": lens, "point": "post_block", "layer": 1}})
    assert refused.value.field == "readouts.a.lens"
