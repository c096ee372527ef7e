# SPDX-License-Identifier: Apache-2.0
"""Capture specs: what users write becomes what it says, and everything else is refused with its path."""

import copy
import json
import pickle
import typing

import jsonschema
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.request.test_any_input import json_values
from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES
from vllm_steer.request import CaptureSpec, Projection, Selector, pack_vector, parse_capture
from vllm_steer.request.capture import DTYPES, REDUCTIONS, CaptureForm, DtypeName, ReduceName
from vllm_steer.request.field_types import json_schema
from vllm_steer.request.selector import POSITIONS, PositionsName

HOOKS = {"post_block": [12]}
FORM = jsonschema.Draft202012Validator(json_schema(CaptureForm))
DIRECTIONS = [[1.0, 2.0, 3.0], [0.0, -1.0, 0.5]]


def one(**spec):
    ((name, parsed),) = parse_capture({"memory": spec})
    assert name == "memory"
    return parsed


def refused(value, field, *words):
    with pytest.raises(SteeringError) as caught:
        parse_capture(value)
    assert caught.value.field == field
    for word in words:
        assert word in caught.value.problem
    assert len(str(caught.value)) < 600


def refused_spec(path, *words, **spec):
    refused({"memory": {"hooks": HOOKS} | spec}, f"capture.memory.{path}", *words)


class TestParsing:
    def test_defaults_are_the_last_prompt_token_after_edits_in_the_models_dtype(self):
        spec = one(hooks=HOOKS)
        assert spec == CaptureSpec(hooks=HOOKS)
        assert (spec.hooks, spec.tokens) == ((("post_block", (12,)),), Selector("last_prompt"))
        assert (spec.before, spec.dtype, spec.reduce, spec.options) == (False, None, None, {})

    def test_none_is_no_capture(self):
        assert parse_capture(None) == ()

    def test_consumers_come_in_the_order_given(self):
        """Catches sorting: results and files follow what the user wrote."""
        parsed = parse_capture({"memory": {"hooks": HOOKS}, "filesystem": {"hooks": {"pre_attn": "all"}}})
        assert [name for name, _ in parsed] == ["memory", "filesystem"]
        assert parsed[1][1].hooks == (("pre_attn", "all"),)

    def test_hooks_are_canonical_whatever_the_order(self):
        """Catches two spellings of one thing that compare unequal, and sites in the order of a dict."""
        spec = one(hooks={"post_block": [5, 3], "pre_attn": "all", "post_attn": np.int64(4)})
        assert spec.hooks == (("pre_attn", "all"), ("post_attn", (4,)), ("post_block", (3, 5)))
        assert spec == one(hooks={"post_attn": [4], "pre_attn": "all", "post_block": (3, 5)})
        assert spec.hooks != one(hooks={"post_attn": [4], "post_block": range(3, 6)}).hooks

    @pytest.mark.parametrize(
        ("written", "intervals"),
        [
            ("last_prompt", ((9, 10),)),
            ("all_prompt", ((0, 10),)),
            ("all_generated", ((10, 2**31 - 1),)),
            ("all", ((0, 2**31 - 1),)),
            ([0, [2, 4], -1], ((0, 1), (2, 4), (9, 10))),
            (range(3, 5), ((3, 5),)),
            (Selector("generated"), ((10, 2**31 - 1),)),
            ({"generated": [[8, None]]}, ((18, 2**31 - 1),)),
        ],
    )
    def test_positions(self, written, intervals):
        """Catches names that are mixed up, such as all_prompt read as all, and forms that the JSON schema lacks."""
        assert one(hooks=HOOKS, positions=written).tokens.intervals(10) == intervals
        if isinstance(written, (str, list, dict)):
            FORM.validate({"hooks": HOOKS, "positions": written})

    @pytest.mark.parametrize(
        ("positions", "path"),
        [({"between": "thinking"}, ""), ({}, ""), ({"generated": []}, ".generated"), ({"generated": None}, "")],
    )
    def test_schema_lacks_what_captures_refuse(self, positions, path):
        """Catches a JSON schema with forms of edits that captures refuse."""
        assert not FORM.is_valid({"hooks": HOOKS, "positions": positions})
        refused_spec(f"positions{path}", positions=positions)

    def test_spec_objects_pass_through(self):
        spec = CaptureSpec(hooks={"pre_attn": 3}, positions="all", before=True, dtype="bfloat16", reduce="mean")
        assert parse_capture({"memory": spec}) == (("memory", spec),)

    def test_other_keys_are_the_consumers_options(self):
        spec = one(hooks=HOOKS, tag="run 3", nested={"a": [1, 2.5, None, True]})
        assert spec.options == {"tag": "run 3", "nested": {"a": [1, 2.5, None, True]}}
        assert spec == CaptureSpec(hooks=HOOKS, options={"tag": "run 3", "nested": {"a": [1, 2.5, None, True]}})

    def test_options_do_not_change_afterwards(self):
        """Catches a spec that shares its options with its caller: the same object, other content, same hash."""
        mine = {"tags": ["a"]}
        spec = CaptureSpec(hooks=HOOKS, options=mine)
        mine["tags"].append("b")
        spec.options["tags"].append("c")
        assert spec.options == {"tags": ["a"]}

    @pytest.mark.parametrize(
        "written",
        [
            DIRECTIONS,
            [np.array(row) for row in DIRECTIONS],
            np.array(DIRECTIONS),
            np.asfortranarray(np.array(DIRECTIONS, np.float16)),
            torch.tensor(DIRECTIONS, dtype=torch.bfloat16),
            pack_vector(np.array(DIRECTIONS).reshape(-1)) | {"shape": [2, 3]},
        ],
        ids=["lists", "arrays", "array", "fortran", "tensor", "packed"],
    )
    def test_directions(self, written):
        """Catches a transposed or flattened reading of any form."""
        projection = one(hooks=HOOKS, reduce={"directions": written}).reduce
        assert projection == Projection(DIRECTIONS)
        assert projection.directions.dtype == np.float32 and projection.directions.flags.c_contiguous
        assert not projection.directions.flags.writeable
        np.testing.assert_array_equal(projection.directions, DIRECTIONS)

    def test_directions_do_not_change_afterwards(self):
        mine = np.array(DIRECTIONS, np.float32)
        projection = Projection(mine)
        mine[:] = 0
        assert projection == Projection(DIRECTIONS)
        with pytest.raises(ValueError, match=r"(?i)writeable"):
            projection.directions.flags.writeable = True


PACKED = pack_vector([1.0, 2.0])
REFUSED = [
    *((value, "capture", ["{consumer: spec}", "post_block"]) for value in (True, [], "memory", 3, [("memory", {})])),
    ({}, "capture", ["empty"]),
    ({f"c{i}": {"hooks": HOOKS} for i in range(17)}, "capture", ["17", "16"]),
    *(({name: {"hooks": HOOKS}}, "capture", ["lower-case"])
      for name in ("", "Memory", "1a", "../x", "a b", "a\n", "é", 3, None, "a" * 65)),
    *(({"memory": spec}, "capture.memory", ["hooks"]) for spec in (None, True, "post_block", [12])),
    # A spec whose keys are reported as misspelt consumers.
    ({"hooks": HOOKS}, "capture", ['put the spec under the name of a consumer: {"memory": {"hooks": ...}}']),
    ({"hooks": HOOKS, "positions": "all"}, "capture", ["'hooks' is not a consumer"]),
    ({"memory": {"post_block": [12]}}, "capture.memory.hooks", ["missing", "'post_block' belongs in hooks"]),
    *(({"memory": {"hooks": HOOKS} | option}, f"capture.memory.{path}", [])  # that JSON cannot carry
      for option, path in (
          ({"x": np.float32(1)}, "x"), ({"x": float("inf")}, "x"), ({"x": 2**63}, "x"), ({"x": [1, {2}]}, "x[1]"),
          ({"x": {"y": b"z"}}, "x.'y'"), ({"x": {1: 2}}, "x"), ({"a b": 1}, "options"), ({3: 1}, "options"),
          ({"x": "y" * 20000}, "options"),
      )),
]  # fmt: skip
REFUSED_SPECS = [
    # Errors that do not lead to the names of captures.
    ({"positions": "generated"}, "positions", ["'generated' is not valid; it is all_generated here"]),
    ({"positions": "prompt"}, "positions", ["it is all_prompt here"]),
    ({"positions": -1}, "positions", ["write [-1] for one position"]),
    ({"positions": np.arange(3)}, "positions", ["convert positions with .tolist()"]),
    *(({"positions": positions}, f"positions{path}", [])
      for positions, path in (
          ("ALL", ""), ([], ""), ([0, "1"], "[1]"), ([[3, 3]], "[0]"), ((0, 1), ""), (None, ""), (True, ""),
      )),
    # Names that depend on the model, or that name a site twice, and swapped keys.
    ({"hooks": {"hidden_states": 1}}, "hooks", ["'hidden_states' is not a hook point"]),
    ({"hooks": {"hook_resid_pre": 1, "pre_attn": 2}}, "hooks", ["names pre_attn twice"]),
    ({"hooks": ["blocks.3.hook_resid_post", "resid_post.3"]}, "hooks[1]", ["repeats post_block of layer 3"]),
    ({"hooks": ["resid_post"]}, "hooks", ["has no layer"]),
    ({"hooks": []}, "hooks", ["is empty"]),
    ({"hooks": {"12": ["post_block"]}}, "hooks", ["the outer keys are hook points and the inner ones layers"]),
    *(({"hooks": hooks}, "hooks", ["post_block" if hooks == {} else "point"])
      for hooks in ({}, None, "all", ["post_block"], 12)),
    ({"hooks": {"mlp": [1]}}, "hooks", ["mlp", *POINT_NAMES]),
    *(({"hooks": {"post_block": layers}}, f"hooks.post_block{path}", [])
      for layers, path in (
          ([], ""), ([0, 1, -1], "[2]"), ([0, True], "[1]"), (4096, ""), ("every", ""), ([3, 3], "[1]"),
          (range(10**12), ""), ([2.0], "[0]"), (None, ""),
      )),
    *(({"before": before}, "before", ["true or false"]) for before in (1, "true", None, np.True_)),
    *(({"dtype": dtype}, "dtype", DTYPES) for dtype in ("float64", "fp8", torch.float32, 32)),
    *(({"reduce": reduce}, "reduce", ["directions"]) for reduce in ({}, True, [], {"directions": [[1.0]], "x": 1})),
    ({"reduce": "sum"}, "reduce", ["not 'sum'", *REDUCTIONS, '{"directions": ', '{"probes": ']),
    *(({"reduce": {"directions": directions}}, f"reduce.directions{path}", [])
      for directions, path in (
          ([], ""), ([[1.0], [1.0, 2.0]], "[1]"), ([[1.0, float("nan")]], "[0][1]"), ([1.0, 2.0], "[0]"),
          ([[[1.0]]], "[0]"), (np.zeros(3), ""), (np.zeros((2, 2, 2)), ""), (np.zeros((0, 2)), ""),
          (np.zeros((1025, 2)), ""), (torch.zeros(2, 65537), ""), (np.zeros((1024, 8192), np.float16), ""),
          ("abc", ""), (3, ""), (PACKED, ".shape"), (PACKED | {"shape": [2, 2]}, ".data"),
          (PACKED | {"shape": [1, 2], "dtype": "int8"}, ".dtype"), (PACKED | {"shape": [10**400, 1]}, ".shape"),
          ({"data": "AAAA"}, ""),
      )),
    # A limit that only arrays meet.
    ({"reduce": {"directions": [np.ones(65536, np.float32)] * 65}}, "reduce.directions", ["components"]),
    ({"tokens": "all"}, "tokens", ["positions"]),
]  # fmt: skip


class TestRefusals:
    @pytest.mark.parametrize(("value", "field", "words"), REFUSED)
    def test_captures(self, value, field, words):
        """Catches a wrong capture that is accepted, and an error without its path or a remedy."""
        refused(value, field, *words)

    @pytest.mark.parametrize(("spec", "path", "words"), REFUSED_SPECS)
    def test_specs(self, spec, path, words):
        """Catches a wrong spec that is accepted, and an error without its path or a remedy."""
        refused_spec(path, *words, **spec)

    def test_limits_and_names_that_are_allowed(self):
        """Catches a limit that is one too small, and a consumer named hooks that is refused."""
        assert len(parse_capture({f"c{i}": {"hooks": HOOKS} for i in range(16)})) == 16
        spec = {"hooks": HOOKS}
        assert parse_capture({"hooks": spec}) == parse_capture({"hooks": CaptureSpec(hooks=HOOKS)})

    def test_names_of_sites(self):
        """Catches a list of names of other libraries that becomes other sites than the same hooks by our names."""
        names = ["blocks.3.hook_resid_post", "layers_output[1]", "resid_mid.2"]
        assert CaptureSpec(hooks=names) == CaptureSpec(hooks={"post_block": [1, 3], "post_attn": [2]})
        assert CaptureSpec(hooks={"resid_pre": "all"}) == CaptureSpec(hooks={"pre_attn": "all"})

    def test_endless_options(self):
        """Catches a recursion error out of a value that holds itself."""
        loop = []
        loop.append(loop)
        refused_spec("x" + "[0]" * 8, x=loop)


DIFFERENT = [
    CaptureSpec(hooks=HOOKS),
    CaptureSpec(hooks={"post_block": [13]}),
    CaptureSpec(hooks=HOOKS, positions="all"),
    CaptureSpec(hooks=HOOKS, before=True),
    CaptureSpec(hooks=HOOKS, dtype="float16"),
    CaptureSpec(hooks=HOOKS, reduce="last"),
    CaptureSpec(hooks=HOOKS, reduce={"directions": [[1.0, 2.0]]}),
    CaptureSpec(hooks=HOOKS, reduce={"directions": [[1.0], [2.0]]}),
    CaptureSpec(hooks=HOOKS, options={"a": 1}),
    CaptureSpec(hooks=HOOKS, options={"a": True}),
    CaptureSpec(hooks={"pre_attn": "all"}, positions=[0, [3, None], -2]),
]


class TestIdentity:
    def test_specs_that_differ_are_unequal(self):
        """Catches a part left out of the comparison."""
        assert len(set(DIFFERENT)) == len(DIFFERENT)
        assert all(a != b for i, a in enumerate(DIFFERENT) for b in DIFFERENT[:i])

    @pytest.mark.parametrize("spec", DIFFERENT, ids=repr)
    @pytest.mark.parametrize(
        "travel",
        [
            lambda spec: pickle.loads(pickle.dumps(spec)),  # noqa: S301
            copy.deepcopy,
            lambda spec: CaptureSpec.from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(spec.to_wire()))),
        ],
        ids=["pickle", "deepcopy", "wire"],
    )
    def test_travels_unchanged(self, spec, travel):
        arrived = travel(spec)
        assert arrived == spec and hash(arrived) == hash(spec)

    @pytest.mark.parametrize(
        "change",
        [{"hooks": 3}, {"hooks": [["post_block"]]}, {"options": "{"}, {"reduce": {"shape": [1, 2], "data": b"1"}}],
    )
    def test_spoiled_wire_is_refused(self, change):
        """Catches an error of another type in the engine, which would end it."""
        with pytest.raises(SteeringError):
            CaptureSpec.from_wire(DIFFERENT[0].to_wire() | change)
        with pytest.raises(SteeringError):
            CaptureSpec.from_wire([1])

    def test_frozen(self):
        with pytest.raises(AttributeError):
            DIFFERENT[0].before = True


@pytest.mark.parametrize(
    ("table", "names"), [(POSITIONS, PositionsName), (DTYPES, DtypeName), (REDUCTIONS, ReduceName)]
)
def test_tables_and_literal_types_name_the_same(table, names):
    assert tuple(table) == typing.get_args(names)


keys = st.sampled_from(["hooks", "positions", "before", "dtype", "reduce", "tag", "directions", "tokens"])
nearly = st.dictionaries(
    st.sampled_from(["memory", "x", "X"]),
    st.fixed_dictionaries(
        {"hooks": st.just(HOOKS) | st.dictionaries(st.sampled_from(POINT_NAMES), json_values, max_size=2)},
        optional={
            "positions": st.sampled_from([*POSITIONS]) | json_values,
            "before": st.booleans() | json_values,
            "dtype": st.sampled_from([*DTYPES]) | json_values,
            "reduce": st.sampled_from([*REDUCTIONS])
            | st.fixed_dictionaries({"directions": json_values})
            | st.fixed_dictionaries({"probes": st.lists(st.sampled_from(["a/b", "a@x/b", "a"])) | json_values}),
            "tag": json_values,
        },
    )
    | st.dictionaries(keys, json_values, max_size=4),
    max_size=2,
)


@settings(deadline=None, max_examples=500)
@given(json_values | nearly)
def test_any_value_parses_alike_after_travel_or_is_refused(value):
    try:
        parsed = parse_capture(value)
    except SteeringError as error:
        assert error.field.startswith("capture") and error.problem and len(str(error)) < 1000
        str(error).encode("utf-8")
        return
    for name, spec in parsed:
        assert CaptureSpec.from_wire(spec.to_wire()) == spec
        assert parse_capture({name: json.loads(json.dumps(value[name]))}) == ((name, spec),)
