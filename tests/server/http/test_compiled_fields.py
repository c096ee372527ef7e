# SPDX-License-Identifier: Apache-2.0
"""Cache of compiled fields: what it returns is what the compiler returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vllm_steer import SteeringError
from vllm_steer.params import PROGRAM_KEY, compile_fields
from vllm_steer.request import pack_vector
from vllm_steer.server.http import compiled_fields
from vllm_steer.server.http.compiled_fields import compile_json_fields


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
    assert compile_json_fields(given) == compile_json_fields(given) == compile_fields(given)
    assert len(calls) == 1


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
