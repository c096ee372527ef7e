# SPDX-License-Identifier: Apache-2.0
"""Any JSON-like value parses to well-formed edits or raises SteeringError with a path, and nothing else."""

import copy
import json
import math
import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES
from vllm_steer.request import FIELD_NAMES, KINDS, OPEN_END, Selector, pack_vector, parse_fields

V, W = [1.0, 2.0], [3.0, 4.0]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-5, 5)
    | st.sampled_from([10**400, 2**31 - 1, 2**31, 4095, 4096])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([*FIELD_NAMES, *POINT_NAMES, *KINDS, "all", "prompt", "vector", "scale", "dtype", "AAAAAA=="])
)
keys = st.sampled_from(
    [
        *POINT_NAMES,
        "kind",
        "point",
        "layers",
        "vector",
        "strength",
        "tokens",
        "low",
        "high",
        "scale",
        "dtype",
        "shape",
        "data",
        "0",
        "1",
        "01",
    ]
) | st.text(max_size=3)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=8,
)
vectors = st.sampled_from([V, W, pack_vector(V), (-1.0, 0.5), [0.0, 0.0], [1.0]])
short = st.dictionaries(
    st.sampled_from(POINT_NAMES),
    st.dictionaries(
        st.integers(0, 9) | st.integers(0, 9).map(str),
        vectors | st.fixed_dictionaries({"vector": vectors}, optional={"scale": st.floats(-9, 9)}),
        max_size=3,
    ),
    max_size=2,
)
general = st.lists(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from([*KINDS]),
            "point": st.sampled_from(POINT_NAMES),
            "layers": st.just("all") | st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=3),
            "vector": vectors,
        },
        optional={
            "strength": st.floats(-9, 9),
            "tokens": st.just("prompt") | st.lists(st.integers(-5, 5) | st.lists(st.integers(-5, 5)), max_size=3),
            "low": st.none() | st.floats(-9, 0),
            "high": st.none() | st.floats(0, 9),
        },
    ),
    max_size=3,
)
requests = st.fixed_dictionaries({}, optional={name: general if name == "steering" else short for name in FIELD_NAMES})


@st.composite
def spoiled_requests(draw):
    """A request that is nearly right: a value somewhere inside is replaced, removed or joined by another."""
    request = copy.deepcopy(draw(requests))
    node = request
    while isinstance(node, (dict, list)) and node:
        key = draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
        inner = node[key]
        if not isinstance(inner, (dict, list)) or not inner or draw(st.booleans()):
            action = draw(st.sampled_from(["replace", "remove", "join"]))
            if action == "replace":
                node[key] = draw(json_values)
            elif action == "remove":
                del node[key]
            elif isinstance(node, dict):
                node[draw(keys)] = draw(json_values)
            else:
                node.append(draw(json_values))
            break
        node = inner
    return request


def assert_well_formed(edits):
    assert isinstance(edits, tuple) and len({e.vector.size for e in edits if e.feature is None}) <= 1
    for e in edits:
        kind = KINDS[e.kind]
        assert e.point in POINT_NAMES
        assert e.layers == "all" or (e.layers and list(e.layers) == sorted(set(e.layers)))
        assert e.layers == "all" or all(type(i) is int and 0 <= i < 4096 for i in e.layers)
        assert e.vector.dtype == np.float32 and e.vector.ndim == 1 and e.vector.flags.c_contiguous
        assert not e.vector.flags.writeable and np.isfinite(e.vector).all()
        assert e.vector.any() or not kind.needs_direction
        assert type(e.strength) is float and math.isfinite(e.strength)
        bounds = [b for b in (e.low, e.high) if b is not None]
        assert bool(bounds) == ("low" in kind.params) and bounds == sorted(bounds)
        assert isinstance(e.tokens, Selector) and -1 <= e.tokens.max_position < OPEN_END
        assert parse_fields({"steering": [json.loads(json.dumps(e.to_wire()))]}) == (e,)


PATH = re.compile(r"(fields|steering|(prefill_|decode_)?steering_vectors)([.\[][A-Za-z0-9_.\[\]]*)?")


def assert_parses_or_is_refused(value):
    try:
        edits = parse_fields(value)
    except SteeringError as error:
        assert PATH.fullmatch(error.field), error.field
        assert error.problem and len(str(error)) < 1000
        str(error).encode("utf-8")
    else:
        assert_well_formed(edits)


@settings(deadline=None, max_examples=300)
@given(json_values | st.dictionaries(st.sampled_from(FIELD_NAMES), json_values))
def test_any_json_value_parses_or_is_refused(value):
    assert_parses_or_is_refused(value)


@settings(deadline=None, max_examples=600)
@given(spoiled_requests())
def test_any_nearly_right_request_parses_or_is_refused(request):
    assert_parses_or_is_refused(request)


@settings(deadline=None, max_examples=300)
@given(requests)
def test_any_request_that_parses_parses_alike_after_json(request):
    """Not the other way round: as JSON keys, 1 and "1" become one, and nothing is left to refuse."""
    try:
        edits = parse_fields(request)
    except SteeringError:
        return
    assert parse_fields(json.loads(json.dumps(request))) == edits
