# SPDX-License-Identifier: Apache-2.0
"""Tests of parsing untrusted JSON."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_steer.errors import SteeringError
from vllm_steer.request import scalars
from vllm_steer.request.scalars import parse_json


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"a": 1, "b": 2, "b": 3}', "'b'"),
        ('{"a": 1, "b": 2, "b": 3, "a": 4}', "'a'"),
        ('{"x": [{"c": 1, "\\u0063": 1}]}', "'c'"),
    ],
)
def test_rejects_duplicate_keys(text: str, key: str) -> None:
    """Catches an ignored part of an object, and an error that names a different key than the first duplicate."""
    with pytest.raises(SteeringError, match=f"^body: cannot be parsed as JSON: duplicate key {key}"):
        parse_json(text, "body")


class CountedKey(str):
    """Key that counts comparisons."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedKey.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_finds_duplicate_key_in_linear_time() -> None:
    """Catches a quadratic search for the duplicate, which lets a small body block a server."""
    keys = [CountedKey(f"key {i}") for i in range(1_000)]
    pairs: list[tuple[str, Any]] = [(key, 0) for key in (*keys, CountedKey("twice"), CountedKey("twice"))]
    CountedKey.compared = 0
    with pytest.raises(ValueError, match="duplicate key 'twice'"):
        scalars._object(pairs)
    assert CountedKey.compared < 4 * len(pairs)


@pytest.mark.parametrize("text", ['{"a": "x\\ud800"}', '{"\\uDC00": 1}', '["\\udc00\\ud800"]'])
def test_texts_that_are_not_unicode_are_refused(text: str) -> None:
    """Catches HTTP 500, or a codec's message, where a name or a text is encoded later."""
    with pytest.raises(SteeringError, match="half of a surrogate pair"):
        parse_json(text, "body")
    assert parse_json('["\\ud83d\\ude00", "\\\\ud800"]', "body") == ["\U0001f600", "\\ud800"]


def test_halves_of_characters_are_refused_in_bytes() -> None:
    """Catches a text that the parser decodes from bytes that are not UTF-8, and that no later code can encode."""
    with pytest.raises(SteeringError, match="cannot be parsed as JSON"):
        parse_json(b'{"a": "\xed\xa0\x80"}', "body")
    assert parse_json('{"a": "\U0001f600"}'.encode("utf-16"), "body") == {"a": "\U0001f600"}
