# SPDX-License-Identifier: Apache-2.0
"""`Edit`: what it keeps, that it cannot change, and that each wrong argument is refused by name."""

import copy
import dataclasses
import difflib
import enum
import json
import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tests import memory
from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES
from vllm_steer.registry.directions import Direction, Directions
from vllm_steer.request import KINDS, Edit, Selector, parse_fields

VECTOR = [3.0, 4.0]


def make(**changes):
    return Edit(**{"kind": "add", "point": "post_block", "layers": 2, "vector": VECTOR} | changes)


def assert_refused(field, *words, **changes):
    with pytest.raises(SteeringError) as caught:
        make(**changes)
    assert caught.value.field == field
    for word in words:
        assert word in caught.value.problem
    assert len(str(caught.value)) < 400


def clamp(**changes):
    return {"kind": "clamp", "low": -1.0} | changes


class TestKept:
    def test_defaults(self):
        edit = make()
        assert (edit.kind, edit.point, edit.layers, edit.strength) == ("add", "post_block", (2,), 1.0)
        assert (edit.tokens, edit.low, edit.high) == (Selector("all"), None, None)
        assert edit.vector.tolist() == VECTOR and edit.vector.dtype == np.float32

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("point", POINT_NAMES)
    def test_every_kind_at_every_point(self, kind, point):
        bounds = {"low": 0.0} if "low" in KINDS[kind].params else {}
        if kind == "feature":
            bounds = {"vector": None, "sae": "topics", "feature": 3, "set": 0.0}
        edit = make(kind=kind, point=point, **bounds)
        assert (edit.kind, edit.point) == (kind, point)

    @pytest.mark.parametrize(
        ("layers", "kept"),
        [
            (0, (0,)),
            (4095, (4095,)),
            (np.int64(3), (3,)),
            ([3, 1], (1, 3)),
            ((1, np.uint8(3)), (1, 3)),
            (range(1, 4), (1, 2, 3)),
            (range(3, 0, -1), (1, 2, 3)),
            ("all", "all"),
        ],
        ids=str,
    )
    def test_layers(self, layers, kept):
        edit = make(layers=layers)
        assert edit.layers == kept
        assert all(type(layer) is int for layer in edit.layers if edit.layers != "all")

    @pytest.mark.parametrize("strength", [0, -2, 1.5, np.float32(0.5), np.float16(2), np.int8(-128)])
    def test_strength(self, strength):
        kept = make(strength=strength).strength
        assert type(kept) is float and kept == float(strength)

    @pytest.mark.parametrize(("low", "high"), [(None, 1), (-1, None), (0.5, 0.5), (-2, 3.0)])
    def test_bounds(self, low, high):
        edit = make(kind="clamp", low=low, high=high)
        assert (edit.low, edit.high) == (low, high)

    def test_str_enum_is_kept_as_a_plain_string(self):
        """Catches an enum member that reaches the wire, where its type is unknown."""
        member = enum.Enum("E", {"a": "ablate", "p": "pre_attn"}, type=str)
        edit = make(kind=member.a, point=member.p)
        assert type(edit.kind) is str and type(edit.point) is str

    def test_add_takes_a_zero_vector(self):
        assert not make(vector=[0.0]).vector.any()

    def test_direction_may_be_as_short_as_float32_goes(self):
        """Catches a norm taken in float32, which is 0 for this vector."""
        assert make(kind="ablate", vector=[1e-30, 0.0]).vector.any()


class TestValue:
    def test_equality_is_by_content(self):
        edit = make(tokens=[1, 2], layers=[1, 2])
        same = make(tokens=[[1, 3]], layers=range(1, 3), vector=torch.tensor(VECTOR, dtype=torch.bfloat16))
        assert edit == same and hash(edit) == hash(same) and edit != "edit"

    @pytest.mark.parametrize(
        "changes",
        [
            {"kind": "ablate"},
            {"point": "pre_attn"},
            {"layers": 3},
            {"layers": "all"},
            {"vector": [3.0, 5.0]},
            {"vector": [3.0, 4.0, 0.0]},
            {"strength": 2.0},
            {"tokens": "prompt"},
            {"kind": "clamp", "low": 0},
            {"kind": "clamp", "high": 0},
        ],
        ids=str,
    )
    def test_each_field_counts(self, changes):
        others = [make(), make(kind="clamp", low=1), make(kind="clamp", high=1)]
        assert make(**changes) not in others

    def test_frozen(self):
        edit = make()
        for name in ("strength", "vector", "other"):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(edit, name, 2.0)
        with pytest.raises(ValueError):
            edit.vector[0] = 1.0

    def test_replace_checks_again(self):
        assert dataclasses.replace(make(), strength=3).strength == 3.0
        with pytest.raises(SteeringError):
            dataclasses.replace(make(), strength=math.nan)

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])  # noqa: S301
    def test_copies_are_equal_and_as_immutable(self, copied):
        """Catches numpy's pickling, which forgets that an array is not writeable."""
        edit = make(kind="clamp", high=2, tokens=[-1, [3, None]])
        other = copied(edit)
        assert other == edit and not other.vector.flags.writeable

    def test_repr_is_short_and_names_what_matters(self):
        text = repr(make(vector=np.ones(4096), tokens=[5], layers=[1, 2]))
        assert len(text) < 200
        for part in ("'add'", "'post_block'", "(1, 2)", "float32[4096], norm 64", "strength=1.0", "Selector([5])"):
            assert part in text
        assert "low" not in text and "low=-1.0" in repr(make(**clamp()))

    @pytest.mark.parametrize(
        "edit",
        [
            make(layers="all", tokens="generated"),
            make(kind="clamp", low=-1, high=2, layers=[1, 3], tokens=[-1, [0, 4], [9, None]], strength=-0.5),
        ],
        ids=["all", "clamp"],
    )
    def test_json_round_trip(self, edit):
        wire = json.loads(json.dumps(edit.to_wire()))
        assert parse_fields({"steering": [wire]}) == (edit,)


NUMBERS = ("strength", "low", "high")
NOT_NUMBERS = (True, np.True_, "1", [1.0], {}, 1j, np.array(1.0), torch.tensor(1.0), Fraction(1))
NOT_FINITE = (math.nan, math.inf, -math.inf, 1e39, -(10**400), np.float32(np.inf), 10**5000)
FEATURE: dict[str, Any] = {"kind": "feature", "vector": None, "sae": "topics", "feature": 3, "set": 2.0}
ROWS: dict[str, Any] = {"kind": "replace", "vector": [VECTOR] * 2}
REFUSED: list[tuple[dict[str, Any], str, list[str]]] = [
    *(({"kind": kind}, "kind", ["add, add_normed, ablate, clamp"])
      for kind in ("", "Add", "rotate", None, 1, ["add"], {}, np.array(["add", "add"]))),
    *(({"point": point}, "point", ["pre_attn, attn_out, post_attn, mlp_in, mlp_out, post_block"])
      for point in ("", "post_mlp", "hook_residual", None, 0, ["pre_attn"])),
    *(({"layers": layers}, "layers", ['"all"'])
      for layers in (None, True, np.True_, 1.0, "1", "ALL", {}, {1}, np.array([1.0]), np.array(["all", "all"]))),
    *(({"layers": [0, layer]}, "layers[1]", ["layer number"]) for layer in (True, np.True_, 1.0, "1", None, [1])),
    *(({"layers": given}, field, ["between 0 and 4095"])
      for layer in (-1, 4096, 10**5000, np.int64(-1))
      for given, field in ((layer, "layers"), ([0, layer], "layers[1]"))),
    *(({"layers": layers}, "layers", ["between 0 and 4095"])
      for layers in (range(-1, 3), range(4090, 4097), range(10**40), range(10**12))),
    *(({"layers": layers}, "layers", ["empty"]) for layers in ([], (), range(0))),
    ({"layers": [1, 2, np.int64(1)]}, "layers[2]", ["repeats layer 1"]),  # steered twice, or once
    # A matrix whose rows go to each other's positions.
    *((ROWS | {"tokens": tokens}, field, ["row i belongs to the i-th position"])
      for tokens, field in (
          ([-1, 0], "tokens[1]"), (range(-1, 1), "tokens[1]"), (range(1, -1, -1), "tokens[1]"),
          ({"generated": [3, 1]}, "tokens.generated[1]"), ({"generated": [[2, 3], 1]}, "tokens.generated[1]"),
      )),
    *((clamp(**{name: value}), name, ["must be a number"]) for name in NUMBERS for value in NOT_NUMBERS),
    *((clamp(**{name: value}), name, ["finite"]) for name in NUMBERS for value in NOT_FINITE),
    ({"strength": None}, "strength", ["number"]),
    *(({"kind": kind, "vector": vector} | ({"low": 0.0} if kind == "clamp" else {}), "vector", ["a direction", kind])
      for kind, row in KINDS.items() if row.needs_direction for vector in ([0.0, -0.0], [1e-60, 0.0])),
    # A parameter that is ignored, and an edit without a feature or a vector.
    *((FEATURE | given, field, [words])
      for given, field, words in (
          ({"sae": None}, "sae", "missing"), ({"sae": "a/b"}, "sae", "not a valid name"),
          ({"feature": -1}, "feature", "must be the number of a feature, 0 to"),
          ({"feature": None}, "feature", "is missing; feature needs the number"),
          ({"set": None}, "set", "either set or add"), ({"add": 1.0}, "set", "either set or add"),
          ({"set": math.inf}, "set", "finite"), ({"vector": [1.0]}, "vector", "omit it"),
          ({"subspace": [[1.0]]}, "subspace", "omit it"), ({"low": 1.0}, "low", "only of clamp"),
          ({"kind": "add", "vector": [1.0]}, "sae", "only of feature"),
          ({"kind": "add", "sae": None, "feature": None, "set": None}, "vector", "is missing"),
      )),
    ({"vector": [1.0, math.nan]}, "vector[1]", ["finite"]),
    ({"tokens": [0, [3, 2]]}, "tokens[1]", ["empty"]),
    # A bound that is dropped without a word.
    *(({"kind": kind, name: 0.0}, name, [kind, "clamp"])
      for kind in ("add", "add_normed", "ablate") for name in ("low", "high")),
    ({"kind": "clamp"}, "low", ["low, high or both"]),
    ({"kind": "clamp", "low": 1.0, "high": 0.5}, "low", ["above"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "field", "words"), REFUSED)
def test_refused_by_name(changes: dict[str, Any], field: str, words: list[str]) -> None:
    """Catches a wrong argument that is accepted or read as another one, and an error without its name or a remedy."""
    assert_refused(field, *words, **changes)


def test_long_range_of_tokens_in_descending_order():
    """Catches a range that is listed to check its order, which fills the memory."""
    with memory.at_most(256), pytest.raises(SteeringError, match="follows 2000000000"):
        make(kind="replace", vector=[VECTOR] * 2, tokens=range(2_000_000_000, 0, -1))


@pytest.mark.parametrize("tokens", [range(2, 4), range(-2, 0), range(0, 4, 2), {"generated": [1, [3, 4]]}])
def test_rows_in_the_order_of_their_positions(tokens):
    assert make(kind="replace", vector=[VECTOR] * 2, tokens=tokens).num_rows == 2
    assert make(kind="replace", vector=[VECTOR], tokens=range(3, 4)).num_rows == 1


@pytest.mark.parametrize("arguments", [{"layer": 1}, {"scale": 2.0}])
def test_unknown_argument_is_pythons_own_error(arguments):
    with pytest.raises(TypeError):
        make(**arguments)


def test_names_of_sites_in_other_libraries():
    """Catches the layer of a name that is dropped, or another point than the name's."""
    named = Edit(kind="add", point="blocks.3.hook_resid_post", vector=[1.0, 2.0])
    assert named == Edit(kind="add", point="post_block", layers=3, vector=[1.0, 2.0])
    assert named == Edit(kind="add", point="resid_post", layers=[3], vector=[1.0, 2.0])


@pytest.mark.parametrize("point", [*POINT_NAMES, "layers_output[2]"])
def test_valid_points_are_not_compared_with_other_names(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a search for similar names in each of thousands of valid edits."""

    def compare(*_: Any, **__: Any) -> list[str]:
        raise AssertionError("names are compared")

    monkeypatch.setattr(difflib, "get_close_matches", compare)
    assert make(point=point).layers == (2,)
    with pytest.raises(AssertionError, match="names are compared"):
        make(point="blocks.2.hook_resid_pst")


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ("hidden_states[30]", "is post_block of layer 29 here, but after the final norm, and no hook point, if it"),
        ("hidden_states[0]", "is pre_attn of layer 0 here; write that"),
        ("hidden_states[-1]", "has a negative number; layers count from 0"),
        ("blocks.-1.hook_resid_post", "has a negative number; layers count from 0"),
        ("hook_embed", "does not mean exactly a hook point; the nearest is pre_attn of layer 0: the"),
        ("lm_head", "is not a hook point; places after the last block"),
    ],
)
def test_hints_for_names_do_not_contradict_themselves(point: str, words: str) -> None:
    """Catches "is not a hook point; it is post_block here"."""
    with pytest.raises(SteeringError) as refused:
        Edit("add", point=point, vector=[1.0])
    assert refused.value.problem.startswith(f"{point!r} {words}")


LENGTHS = Directions({2: Direction("post_block", 2, np.float32([0.6, 0.8]), 20.0, distance=5.0)}, "m", "", {})


@pytest.mark.parametrize("vector", [LENGTHS, LENGTHS[2]])
def test_a_dose_is_in_lengths_of_the_stream(vector: Any) -> None:
    """Catches a dose taken for a strength or multiplied by the vector's length, applied twice, or of the other sign."""
    edit = make(vector=vector, dose=-0.5)
    assert edit == make(vector=LENGTHS[2].vector, strength=-0.5 * 20 / 5)
    assert np.linalg.norm(edit.strength * edit.vector) == pytest.approx(10) and edit.dose is None
    assert make(**edit.to_wire()) == edit
    assert make(vector=vector, strength=3) == make(vector=[3.0, 4.0], strength=3)
    assert make(vector=vector, kind="ablate").kind == "ablate"
    assert make(vector=vector, dose=-0.5, strength=None) == edit and edit.given_dose == -0.5
    against = make(vector=dataclasses.replace(LENGTHS[2], distance=-5.0), dose=-0.5)
    np.testing.assert_allclose(against.strength * against.vector, edit.strength * edit.vector, rtol=1e-6)


def test_doses_without_a_meaning_are_refused() -> None:
    """Catches a strength or a length that is guessed, a vector of another site, and a strength out of bounds."""
    assert_refused("dose", "an array does not tell; use a vector of a file made with `vllm-steer make`", dose=0.5)
    unknown = Direction("post_block", 2, np.float32([0.6, 0.8]), math.nan)
    assert_refused("dose", "the vector of post_block[2] does not tell", vector=unknown, dose=0.5)
    assert_refused("dose", "cannot be combined with strength; give one", vector=LENGTHS, dose=0.5, strength=1.0)
    assert_refused("dose", "is not a parameter of ablate, only of add", vector=LENGTHS, dose=0.5, kind="ablate")
    assert_refused("vector", "a module of a server, which only edits in `steering`", vector={"module": "a"}, dose=0.5)
    assert_refused("layers", "has no vector of layer 3; use one of 2", vector=LENGTHS, dose=0.5, layers=3)
    assert_refused("layers", "must be one layer", "send one edit for each layer", vector=LENGTHS, layers="all")
    assert_refused("point", "is pre_attn, but the vectors are of post_block", vector=LENGTHS, point="pre_attn")
    for dose in (1000.5, -1e20, 3e38):
        assert_refused("dose", "between -1000 and 1000", f"not {dose}; beyond, rounding", vector=LENGTHS, dose=dose)
    short = Direction("post_block", 2, np.float32([0.6, 0.8]), 20.0, distance=1e-38)
    assert_refused("dose", "a dose of 0.5 is 1e+39 times the vector of post_block[2]", vector=short, dose=0.5)
    assert_refused("dose", "must be a number", vector=LENGTHS, dose="0.5")


def test_the_kind_may_be_the_first_argument() -> None:
    """Catches the form in which most people write an edit refused."""
    fields: dict[str, Any] = {"point": "post_block", "layers": 1, "vector": [1.0]}
    assert Edit("add", **fields) == Edit(kind="add", **fields)
    with pytest.raises(TypeError, match="arguments: kind, point"):
        Edit("add", "post_block", layers=1, vector=[1.0])  # type: ignore[call-arg, misc]
