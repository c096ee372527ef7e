# SPDX-License-Identifier: Apache-2.0
"""JSON of strangers."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_steer.errors import SteeringError
from vllm_steer.registry import strict_json
from vllm_steer.registry.strict_json import parse_json


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"a": 1, "b": 2, "b": 3}', "'b'"),
        ('{"a": 1, "b": 2, "b": 3, "a": 4}', "'a'"),
        ('{"x": [{"c": 1, "\\u0063": 1}]}', "'c'"),
    ],
)
def test_a_key_that_stands_twice_is_named(text: str, key: str) -> None:
    """Catches an object of which a part is passed over, and an error that names another key than the first."""
    with pytest.raises(SteeringError, match=f"^body: cannot be parsed as JSON: duplicate key {key}"):
        parse_json(text, "body")


class Counted(str):
    """A key that counts how often one is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_the_key_is_found_without_comparing_each_with_each() -> None:
    """Catches a search whose work grows with the square of the keys: a body of few bytes holds up a server."""
    keys = [Counted(f"key {i}") for i in range(1_000)]
    pairs: list[tuple[str, Any]] = [(key, 0) for key in (*keys, Counted("twice"), Counted("twice"))]
    Counted.compared = 0
    with pytest.raises(ValueError, match="duplicate key 'twice'"):
        strict_json._object(pairs)
    assert Counted.compared < 4 * len(pairs)
