# SPDX-License-Identifier: Apache-2.0
"""Cache of compiled fields: what it returns is what the compiler returns."""

from __future__ import annotations

import base64
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import pytest

from vllm_steer import SteeringError
from vllm_steer.params import PROGRAM_KEY, compile_fields
from vllm_steer.program import Program
from vllm_steer.request import pack_vector
from vllm_steer.server.http import compiled_fields
from vllm_steer.server.http.compiled_fields import compile_json_fields

CAPTURE: dict[str, Any] = {"memory": {"hooks": {"post_block": [1]}, "positions": "all"}}
EDITS: list[Any] = [{"kind": "ablate", "point": "post_block", "layers": 2, "vector": [1.0] * 8}]
PROPERTIES = [name for name, each in vars(Program).items() if isinstance(each, cached_property)]


def fields(**changes: Any) -> dict[str, Any]:
    probe = {"probe": "module/p", "point": "post_block", "layer": 1, **changes}
    return {"readouts": {"score": probe}}


def test_equal_fields_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a cache without effect, and an entry that a caller can change."""
    calls: list[Any] = []
    monkeypatch.setattr(compiled_fields, "_cache", {})
    monkeypatch.setattr(compiled_fields, "compile_fields", lambda given: calls.append(given) or compile_fields(given))
    first = compile_json_fields(fields())
    first["other"] = b"1"
    assert compile_json_fields(fields()) == compile_fields(fields())
    assert len(calls) == 1


def test_a_vector_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a cache for which a vector of 8,192 numbers, as large models have, is too large."""
    calls: list[Any] = []
    monkeypatch.setattr(compiled_fields, "compile_fields", lambda given: calls.append(given) or compile_fields(given))
    given = {"steering_vectors": {"post_block": {"1": {"vector": pack_vector(np.full(8192, 1.5, dtype="f4"))}}}}
    first = compile_json_fields(given)
    calls.clear()
    assert compile_json_fields(given) == first == compile_fields(given)
    assert not calls


def vectors(*numbers: Any, kind: str = "<f4", **more: Any) -> dict[str, Any]:
    """Return fields with a vector for each number, of which the first has a scale."""
    packed = [pack_vector(np.full(8, number, dtype="f4")) for number in numbers]
    if kind == "<f2":
        halves = [base64.b64encode(np.full(8, number, kind).tobytes()).decode() for number in numbers]
        packed = [{"dtype": "float16", "shape": [8], "data": data} for data in halves]
    layers: dict[str, Any] = {str(i): each for i, each in enumerate(packed)}
    layers["0"] = {"vector": packed[0], "scale": 2.0}
    return {
        "steering_vectors": {"post_block": layers},
        "decode_steering_vectors": {"pre_attn": {"3": pack_vector(np.full(8, numbers[-1] + 100))}},
        **more,
    }


@pytest.mark.parametrize("numbers", [(3.0, 4.0), (103.0, 3.0), (1.0, 1.0), (0.0, 2.0), (3.0,), (3.0, 4.0, 5.0)])
@pytest.mark.parametrize("kind", ["<f4", "<f2"])
@pytest.mark.parametrize("more", [{}, {"steering": EDITS}, {"readouts": fields()["readouts"]}, {"capture": CAPTURE}])
def test_fields_with_other_vectors_are_compiled_alike(numbers: Any, kind: str, more: dict[str, Any]) -> None:
    """Catches an outline with vectors in the wrong places, without some digests, or of other fields.

    Also catches a property that depends on vectors and is taken over from the outline.
    """
    for earlier in ((1.0, 2.0), (1.5, 2.5), (7.0,), (7.5,), (7.0, 8.0, 9.0), (7.5, 8.5, 9.5)):
        program = Program.from_bytes(compile_json_fields(vectors(*earlier, kind=kind, **more))[PROGRAM_KEY])
        for name in PROPERTIES:  # later programs take these over from the outline
            getattr(program.outline, name)
    given = vectors(*numbers, kind=kind, **more)
    compiled = compile_json_fields(given)
    assert compiled == compile_fields(given)
    program, own = (
        Program.from_bytes(compiled[PROGRAM_KEY]),
        msgspec.msgpack.decode(compiled[PROGRAM_KEY], type=Program),
    )
    assert {name: getattr(program, name) for name in PROPERTIES} == {name: getattr(own, name) for name in PROPERTIES}


def test_an_edit_of_strength_0_has_no_place_in_an_outline() -> None:
    """Catches an error of the outline for a vector that the compiler leaves out."""
    for number in (21.0, 22.0):
        given = vectors(number, number + 1)
        given["steering_vectors"]["post_block"]["0"]["scale"] = 0.0
        assert compile_json_fields(given) == compile_fields(given)


def test_other_vectors_are_compiled_from_an_outline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches outlines without effect, and programs that do not share what follows from their structure."""
    calls: list[Any] = []
    monkeypatch.setattr(compiled_fields, "_outlines", {})
    monkeypatch.setattr(compiled_fields, "compile_fields", lambda given: calls.append(given) or compile_fields(given))
    given = [vectors(number, number + 1) for number in (11.0, 13.0, 15.0)]
    programs = [Program.from_bytes(compile_json_fields(each)[PROGRAM_KEY]) for each in given]
    assert len(calls) == 2  # the first fields, and their outline
    assert programs[1].outline is programs[2].outline


@pytest.mark.parametrize(
    "other",
    [
        {"readouts": fields(probe=pack_vector(np.full(8, 21.0)))["readouts"]},
        {"steering": [{**EDITS[0], "kind": "add", "vector": pack_vector(np.full(8, 21.0))}]},
        {"steering": [{**EDITS[0], "vector": pack_vector(np.eye(8, dtype="f4")[0])}]},
    ],
)
def test_an_equal_vector_of_another_field_stays(other: dict[str, Any]) -> None:
    """Catches an outline in which a probe, an edit or an ablated direction follows the vector that it once equalled."""
    for vector in (np.full(8, 21.0), np.eye(8)[0], np.full(8, 22.0), np.full(8, 21.0), np.eye(8)[0] * 2):
        given = {"steering_vectors": {"post_block": {"0": pack_vector(vector)}}, **other}
        assert compile_json_fields(given) == compile_fields(given)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"data": None}, r"\[0\]\.data: must be a base64 string"),
        ({"data": "!" * 44}, r"\[0\]\.data: is not valid base64"),
        ({"data": "AAAA"}, r"\[0\]\.data: has 4 characters"),
        ({"data": pack_vector(np.full(8, 1.0))["data"][:-4] + "gH8="}, r"\[0\]\[7\]: is .* in float32"),
        ({"data": "A" * 43 + "=", "more": 1}, r"\[0\]: a packed array has the keys"),
    ],
)
def test_invalid_vectors_are_refused_after_valid_ones(wrong: dict[str, Any], problem: str) -> None:
    """Catches an outline that takes a vector unseen, and an error without the path of the vector."""
    for number in (1.0, 2.0):
        valid = {"steering_vectors": {"post_block": {"0": pack_vector(np.full(8, number))}}}
        compile_json_fields(valid)
    valid["steering_vectors"]["post_block"]["0"].update(wrong)
    with pytest.raises(SteeringError, match=r"steering_vectors\.post_block" + problem):
        compile_json_fields(valid)


@pytest.mark.parametrize("changed", [{"bias": 1.0}, {"layer": 2}, {"sigmoid": True}, {"positions": "all"}])
def test_other_fields_are_another_entry(changed: dict[str, Any]) -> None:
    """Catches a key without a part of the fields."""
    assert compile_json_fields(fields())[PROGRAM_KEY] != compile_json_fields(fields(**changed))[PROGRAM_KEY]
    assert compile_json_fields(fields(**changed)) == compile_fields(fields(**changed))


@pytest.mark.parametrize("wrong", [{"bias": float("nan")}, {"bias": True}, {"sigmoid": 1}, {"layer": 1.0}])
def test_invalid_fields_are_refused_after_similar_valid_ones(wrong: dict[str, Any]) -> None:
    """Catches a key under which null, false or 1 equals an invalid value."""
    for valid in ({"bias": None}, {"bias": 1}, {"sigmoid": True}, {"layer": 1}):
        try:
            compile_json_fields(fields(**valid))
        except SteeringError:
            continue
    for _ in range(2):
        with pytest.raises(SteeringError):
            compile_json_fields(fields(**wrong))


def test_large_fields_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a cache that keeps vectors of megabytes."""
    monkeypatch.setattr(compiled_fields, "MAX_FIELD_BYTES", 10)
    cache: dict[bytes, Any] = {}
    monkeypatch.setattr(compiled_fields, "_cache", cache)
    assert compile_json_fields(fields()) == compile_fields(fields())
    assert not cache


def test_fields_without_a_key_are_refused_by_name() -> None:
    """Catches an error of the encoder, which names no field, instead of the parser's."""
    for vector in ([10**400], ["\ud800"]):
        with pytest.raises(SteeringError, match=r"steering_vectors\.post_block\[1\]"):
            compile_json_fields({"steering_vectors": {"post_block": {"1": vector}}})
