# SPDX-License-Identifier: Apache-2.0
"""`parse_fields`: short forms mean what the general form says; each wrong field is refused by its path."""

import copy
import json
import math

import numpy as np
import pytest
import torch

from vllm_steer.errors import SteeringError
from vllm_steer.request import FIELD_NAMES, Edit, Selector, pack_vector, parse_fields

V, W = [1.0, 2.0], [3.0, 4.0]
EDIT = {"kind": "add", "point": "pre_attn", "layers": 1, "vector": V}


def edit(**changes):
    return Edit(**EDIT | changes)


def assert_refused(fields, field, *words):
    with pytest.raises(SteeringError) as caught:
        parse_fields(fields)
    assert caught.value.field == field
    for word in words:
        assert word in caught.value.problem
    assert len(str(caught.value)) < 500


SHORT = "steering_vectors"
KEYS_THAT_INT_READS = ["15 ", " 15", "+15", "-0", "-01", "015", "00", "1_0", "\u0661", "15\n"]
NOT_DECIMAL = [*KEYS_THAT_INT_READS, "", "1e1", "1.0", "0x1", "all", "9" * 5000]


def at(key, given=V, point="pre_attn"):
    return {SHORT: {point: {key: given}}}


REFUSED = [
    *(({name: value}, name, ["{point: {layer: vector}}"])
      for name in FIELD_NAMES[:3] for value in ([], "x", 1, True, V, np.array(V))),
    *(({SHORT: {"pre_attn": value}}, f"{SHORT}.pre_attn", ["{layer: vector}"])
      for value in (None, [], "x", 1, V, np.array(V))),
    # A request that looks steered and is not.
    ({SHORT: {}}, SHORT, ["empty"]),
    ({SHORT: {"pre_attn": {}}}, f"{SHORT}.pre_attn", ["empty"]),
    ({SHORT: {"pre_attn": {1: V}, "post_attn": {}}}, f"{SHORT}.post_attn", ["empty"]),
    *((at(1, point=point), SHORT, ["pre_attn, attn_out, post_attn, mlp_in, mlp_out, post_block"])
      for point in ("post_mlp", "", "PRE_ATTN", True, None, ("pre_attn",))),
    *((at(key), f"{SHORT}.pre_attn", ["decimal"]) for key in NOT_DECIMAL),
    *((at(key), f"{SHORT}.pre_attn", ["layer number"]) for key in (True, 1.0, None, (1,), np.float64(1))),
    *((at(key), f"{SHORT}.pre_attn", ["between 0 and 4095"]) for key in (-1, "-1", 4096, "4096", "999999999")),
    ({SHORT: {"pre_attn": {15: V, "15": W}}}, f"{SHORT}.pre_attn", ["layer 15 twice"]),
    *((at(1, given), f"{SHORT}.pre_attn[1]", ["scale"])
      for given in ({}, {"scale": 2.0}, {"vec": V}, {"vector": V, "strength": 1}, {"vector": V, "dtype": "float32"},
                    {1: V})),
    *((at(1, {"vector": V, "scale": scale}), f"{SHORT}.pre_attn[1].scale", [])
      for scale in (None, True, "2", [2.0], math.nan, math.inf, 1e39, 10**400)),
    *((at("7", given), f"{SHORT}.pre_attn[7]{where}", [])
      for given, where in (
          (None, ""), ([1.0, None], "[1]"), ({"vector": [math.nan]}, ".vector[0]"), ({"vector": [[1.0]]}, ".vector"),
          (pack_vector(V) | {"dtype": "int8"}, ".dtype"),
          ({"vector": pack_vector(V) | {"shape": [3]}}, ".vector.data"),
          ({"dtype": "float32", "shape": [2]}, ""),
      )),
    *(({"steering": value}, "steering", ["list of edits"]) for value in ({}, EDIT, 1, True, {1}, np.array(V))),
    # A text that is iterated, and an error that hides what to do offline.
    ({"steering": "0.7 calm"}, "steering", ["pass Expression.parse(text).edits(vectors)"]),
    *(({"steering": value}, "steering", ["empty"]) for value in ([], ())),
    *(({"steering": [EDIT, item]}, "steering[1]", ["Edit or a dict"])
      for item in (None, "x", 1, [], [EDIT], Selector("all"))),
    *(({"steering": [EDIT | {key: 1}]}, "steering[0]", ["unknown key", "strength"])
      for key in ("layer", "scale", "", 1, None, "\ud800")),
    *(({"steering": [EDIT, {key: EDIT[key] for key in EDIT if key != name}]}, f"steering[1].{name}", ["missing"])
      for name in EDIT),
    *(({"steering": [EDIT, EDIT, EDIT | changes]}, f"steering[2].{where}", [])
      for changes, where in (
          ({"kind": "rotate"}, "kind"), ({"point": "x"}, "point"), ({"layers": [0, -1]}, "layers[1]"),
          ({"vector": [1.0, True]}, "vector[1]"), ({"vector": {}}, "vector"), ({"strength": None}, "strength"),
          ({"tokens": [0, [1, 1]]}, "tokens[1]"), ({"tokens": [0, [1, "2"]]}, "tokens[1][1]"), ({"low": 0}, "low"),
      )),
    *(({name: None}, "fields", ["decode_steering_vectors"]) for name in ("steer", "Steering", "", 1, None)),
    *((fields, "steering", ["mapping"]) for fields in (None, [], "steering", 1, [EDIT])),
    ({SHORT: {"pre_attn": {1: V}}, "steering": [EDIT, EDIT | {"vector": [1.0]}]}, "steering[1]",
     ["width 1", f"{SHORT}.pre_attn[1]", "2"]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "field", "words"), REFUSED)
def test_refused_by_path(fields, field, words):
    """Catches a wrong value that is accepted or read as another one, and an error without its path or a remedy."""
    assert_refused(fields, field, *words)


class TestShortFields:
    @pytest.mark.parametrize(
        ("name", "tokens"),
        [("steering_vectors", "all"), ("prefill_steering_vectors", "prompt"), ("decode_steering_vectors", "generated")],
    )
    def test_each_covers_its_tokens(self, name, tokens):
        assert parse_fields({name: {"pre_attn": {1: V}}}) == (edit(tokens=tokens),)

    @pytest.mark.parametrize("key", [15, "15", np.int64(15)])
    @pytest.mark.parametrize(
        "given",
        [
            V,
            tuple(V),
            np.array(V),
            torch.tensor(V),
            pack_vector(V),
            {"vector": V},
            {"vector": pack_vector(V)},
        ],
        ids=["list", "tuple", "numpy", "torch", "packed", "dict", "dict of packed"],
    )
    def test_every_form_of_layer_and_vector(self, key, given):
        assert parse_fields({"steering_vectors": {"pre_attn": {key: given}}}) == (edit(layers=15),)

    def test_scale_is_the_strength(self):
        fields = {"steering_vectors": {"pre_attn": {"0": {"scale": -2, "vector": V}}}}
        assert parse_fields(fields) == (edit(layers=0, strength=-2.0),)

    def test_order(self):
        """Base, prefill, decode, then the general form, whatever the order of the keys."""
        parsed = parse_fields(
            {
                "steering": [edit(kind="ablate"), EDIT],
                "decode_steering_vectors": {"post_block": {3: V, 2: W}},
                "steering_vectors": {"post_attn": {1: V}, "pre_attn": {1: V}},
                "prefill_steering_vectors": {"pre_attn": {5: W}},
            }
        )
        assert [(e.kind, e.point, e.layers, e.tokens.to_wire()) for e in parsed] == [
            ("add", "post_attn", (1,), "all"),
            ("add", "pre_attn", (1,), "all"),
            ("add", "pre_attn", (5,), "prompt"),
            ("add", "post_block", (3,), "generated"),
            ("add", "post_block", (2,), "generated"),
            ("ablate", "pre_attn", (1,), "all"),
            ("add", "pre_attn", (1,), "all"),
        ]

    def test_hints_for_keys(self):
        """Catches refusals of common keys that do not lead to the valid form."""
        field = "steering_vectors"
        for key in (-1, "-1"):
            hint = "negative numbers are not supported"
            assert_refused({field: {"pre_attn": {key: V}}}, f"{field}.pre_attn", "layers count from 0", hint)
        hint = 'for all layers use steering=[{"layers": "all", ...}]'
        assert_refused({field: {"pre_attn": {"all": V}}}, f"{field}.pre_attn", hint)
        for key in (1, "1"):
            assert_refused({field: {key: {"pre_attn": V}}}, field, "the outer keys are hook points")

    @pytest.mark.parametrize(
        ("name", "point"),
        [("hook_resid_post", "post_block"), ("resid_mid", "post_attn"), ("hook_mlp_out", "mlp_out")],
    )
    def test_names_of_transformer_lens(self, name, point):
        """Catches a name that is refused, or taken for another point."""
        (edit,) = parse_fields({"steering_vectors": {name: {1: V}}})
        assert (edit.point, edit.layers) == (point, (1,))

    def test_factor_under_the_name_of_the_other_form(self):
        """Catches a strength or scale refused without the name that is valid there."""
        given = {"vector": V, "strength": 2.0}
        path = "steering_vectors.pre_attn[1]"
        assert_refused({"steering_vectors": {"pre_attn": {1: given}}}, path, "did you mean scale?")
        assert_refused({"steering": [EDIT | {"scale": 2.0}]}, "steering[0]", "did you mean strength?")

    def test_same_layer_in_two_fields_is_two_edits(self):
        by_point = {"pre_attn": {1: V}}
        parsed = parse_fields({"steering_vectors": by_point, "decode_steering_vectors": by_point})
        assert parsed == (edit(), edit(tokens="generated"))


class TestSteering:
    def test_one_edit_alone(self):
        assert parse_fields({"steering": edit()}) == parse_fields({"steering": [edit()]}) == (edit(),)

    def test_edits_are_kept_as_they_are(self):
        one = edit()
        assert parse_fields({"steering": (one,)})[0] is one

    def test_dict_with_all_fields(self):
        item = EDIT | {
            "kind": "clamp",
            "layers": [2, 1],
            "strength": 0.5,
            "tokens": [[0, None]],
            "low": None,
            "high": 1,
        }
        (parsed,) = parse_fields({"steering": [json.loads(json.dumps(item))]})
        assert parsed == edit(kind="clamp", layers=(1, 2), strength=0.5, tokens=[[0, None]], high=1.0)


class TestRequest:
    @pytest.mark.parametrize("fields", [{}, dict.fromkeys(FIELD_NAMES), {"steering": None}], ids=str)
    def test_nothing_given(self, fields):
        assert parse_fields(fields) == ()

    def test_input_is_left_alone(self):
        fields = {"steering_vectors": {"pre_attn": {"1": {"vector": V}}}, "steering": [dict(EDIT)]}
        before = copy.deepcopy(fields)
        parse_fields(fields)
        assert fields == before

    def test_count_limit(self):
        one = edit()
        assert len(parse_fields({"steering": [one] * 4096})) == 4096
        assert_refused({"steering": [one] * 4097}, "steering[4096]", "4096")
        fields = {"steering_vectors": {"pre_attn": {1: V}}, "steering": [one] * 4096}
        assert_refused(fields, "steering[4095]", "4096")


@pytest.mark.parametrize("others", [[], [{"kind": "add", "point": "post_block", "layers": 1, "vector": [1.0]}]])
def test_gates_of_the_fork_are_refused_by_name(others: list[dict[str, object]]) -> None:
    """Catches a gate of RhizoNymph/vllm read as a misspelt edit, alone or among edits."""
    gate = {"when": {"kind": "always"}, "scope": "this_token", "apply": {"kind": "attenuate", "strength": 0.5}}
    with pytest.raises(SteeringError, match=r"is a gate of RhizoNymph/vllm .* window token") as caught:
        parse_fields({"steering": [*others, gate]})
    assert caught.value.field == f"steering[{len(others)}]"
