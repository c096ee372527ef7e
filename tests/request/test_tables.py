# SPDX-License-Identifier: Apache-2.0
"""The tables of points and kinds agree with the types, the error travels, and nothing heavy is imported."""

import dataclasses
import inspect
import pickle
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import vllm_steer
from vllm_steer.errors import SteeringError
from vllm_steer.points import OPTIONAL_POINTS, POINT_NAMES, POINTS, PointName, columns_of, points_on
from vllm_steer.program import instructions
from vllm_steer.request import KINDS, Edit, EditKind, KindName
from vllm_steer.request.request_form import request_schemas
from vllm_steer.request.selector import NAMED, SelectorName


@pytest.mark.parametrize(
    ("table", "names"),
    [(KINDS, KindName), (POINTS, PointName), (NAMED, SelectorName)],
    ids=["kind", "point", "tokens"],
)
def test_tables_and_literal_types_name_the_same(table, names):
    assert tuple(table) == typing.get_args(names)


def test_points_are_in_order_of_computation():
    assert POINT_NAMES == ("pre_attn", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_block")
    assert [(name, point.name, point.index) for name, point in POINTS.items()] == [
        (name, name, i) for i, name in enumerate(POINT_NAMES)
    ]


def test_the_points_of_an_engine():
    """Catches an optional point that is there unasked, and columns that another number of points would shift."""
    assert points_on(()) == ("pre_attn", "post_attn", "post_block")
    assert points_on(("mlp_out", "attn_out")) == ("pre_attn", "attn_out", "post_attn", "mlp_out", "post_block")
    assert points_on(OPTIONAL_POINTS) == POINT_NAMES
    assert columns_of(points_on(()), 2) == {0: 0, 2: 1, 5: 2, 6: 3, 8: 4, 11: 5}
    assert columns_of(POINT_NAMES, 2) == {site: site for site in range(12)}


def test_points_name_the_transformer_lens_hooks():
    assert [point.aliases["TransformerLens"].partition(",")[0] for point in POINTS.values()] == [
        f"blocks.{{i}}.{hook}"
        for hook in (
            "hook_resid_pre",
            "hook_attn_out",
            "hook_resid_mid",
            "ln2.hook_normalized",
            "hook_mlp_out",
            "hook_resid_post",
        )
    ]
    assert len({tuple(point.aliases) for point in POINTS.values()}) == 1, "the same libraries for each point"


def test_kinds_take_arguments_of_edit():
    arguments = set(inspect.signature(Edit).parameters) - {"kind", "point", "layers", "tokens", "when", "live"}
    assert set().union(*(kind.params for kind in KINDS.values())) == arguments


def test_kinds_have_instructions_of_their_own() -> None:
    """Catches a kind with the number of another instruction, which the device would run instead."""
    others = (instructions.CAPTURE, instructions.READ, instructions.GATE, instructions.REPLACE_AT,
              instructions.SET_AT, instructions.MEASURE, 0)  # fmt: skip
    numbers = [*others, *(kind.code for kind in KINDS.values())]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_what_a_kind_needs_is_declared_and_missing_by_name(kind: EditKind) -> None:
    """Catches a parameter that a kind needs and an edit lacks, so that it is computed without it."""
    assert {*kind.vectors, *kind.required, *kind.either} <= {*kind.params}
    whole: dict[str, Any] = {"vector": [1.0], "low": 0.0, "sae": "topics", "feature": 1, "set": 1.0}
    given = {name: value for name, value in whole.items() if name in kind.params}
    Edit(kind.name, point="post_block", layers=1, **given)
    for name in (*kind.vectors, *kind.required, *kind.either[:1]):
        with pytest.raises(SteeringError) as refused:
            Edit(kind.name, point="post_block", layers=1, **{**given, name: None})
        assert refused.value.field == name


def test_an_edit_of_a_feature_is_flat_and_travels() -> None:
    """Catches an attribute that is not the argument of its name, so that a copy is another edit."""
    edit = Edit("feature", point="post_block", layers=1, sae="topics", feature=3, add=0.5, live="calm")
    assert (edit.sae, edit.feature, edit.set, edit.add, edit.width) == ("topics", 3, None, 0.5, 0)
    assert dataclasses.replace(edit, strength=2.0).strength == 2.0
    assert dataclasses.replace(edit, strength=1.0) == edit == pickle.loads(pickle.dumps(edit))  # noqa: S301
    assert edit.to_wire() == {
        "kind": "feature", "point": "post_block", "layers": [1], "strength": 1.0, "tokens": "all", "sae": "topics",
        "feature": 3, "add": 0.5, "live": "calm",
    }  # fmt: skip


def test_only_add_and_replace_need_no_direction():
    assert [name for name, kind in KINDS.items() if not kind.needs_direction] == ["add", "replace", "feature"]


@pytest.mark.parametrize("table", [KINDS, POINTS, POINTS["pre_attn"].aliases])
def test_tables_are_frozen(table):
    with pytest.raises(TypeError):
        table["new"] = None


def test_error_survives_pickling():
    """Catches an exception that cannot cross from the engine's process to the front end's."""
    error = pickle.loads(pickle.dumps(SteeringError("a[1]", "is wrong")))  # noqa: S301
    assert (error.field, error.problem, str(error)) == ("a[1]", "is wrong", "a[1]: is wrong")
    assert isinstance(error, ValueError)


def test_spec_imports_neither_torch_nor_vllm():
    """In a fresh interpreter, with the package's own __init__ left out, and after parsing."""
    program = f"""
import sys, types
package = types.ModuleType("vllm_steer")
package.__path__ = [{str(Path(vllm_steer.__file__).parent)!r}]
sys.modules["vllm_steer"] = package
from vllm_steer.request import parse_fields
parse_fields({{"steering_vectors": {{"pre_attn": {{"1": [1.0, 2.0]}}}}}})
try:
    parse_fields({{"steering_vectors": {{"pre_attn": {{"1": object()}}}}}})
except ValueError:
    print(sorted({{"torch", "vllm"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_encoded_edits_conform_to_the_form() -> None:
    """Catches a wire form that the published JSON Schema does not allow."""
    edit = Edit(kind="clamp", point="mlp_in", layers=[3, 1], vector=[1.0, 2.0], low=-1, tokens=[1, (-3, None)])
    assert jsonschema.Draft202012Validator(request_schemas()["steering"]).is_valid([edit.to_wire()])
    wrong = {**edit.to_wire(), "layers": []}
    assert not jsonschema.Draft202012Validator(request_schemas()["steering"]).is_valid([wrong])
