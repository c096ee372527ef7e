# SPDX-License-Identifier: Apache-2.0
"""Encoding of request fields as JSON types: arrays and tensors are packed, edits and selectors become dicts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES
from vllm_steer.request import Edit, Reference, Selector, pack_vector, parse_vector
from vllm_steer.request.matrix import parse_matrix
from vllm_steer.request.scalars import shown
from vllm_steer.request.vector import pack_array
from vllm_steer.site_names import find_foreign_site

_LAYER_KEYS = frozenset(("layers", *POINT_NAMES))


def to_json(value: Any, field: str) -> Any:
    """Encode a value as JSON types. The server validates its meaning.

    Args:
        value: Value as users write it.
        field: Path of the value, for errors.

    Raises:
        SteeringError: The value has no JSON form.
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            raise SteeringError(field, f"{value} cannot be sent as JSON; numbers must be finite")
        return value
    if isinstance(value, str):
        return _text(value, field)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, (Edit, Selector, Reference)):
        return value.to_wire()
    if isinstance(value, Mapping):
        value = {
            # Layers, not a vector.
            key: item.tolist() if hasattr(item, "tolist") and _has_layers(key) else item
            for key, item in value.items()
        }
        encoded = {_text(str(key), field): to_json(item, f"{field}.{key}") for key, item in value.items()}
        if len(encoded) != len(value):
            duplicate = next(key for key, count in Counter(map(str, value)).items() if count > 1)
            raise SteeringError(field, f"key {duplicate} is given twice, with different types")
        return encoded
    if isinstance(value, (list, tuple, range)):
        if all(isinstance(item, float) and math.isfinite(item) for item in value):
            return list(value)  # fast path for vectors
        return [to_json(item, f"{field}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return to_json(value.item(), field)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        masked = isinstance(value, np.ma.MaskedArray)
        return _number(value, field) if len(value.shape) == 0 and not masked else _pack(value, field)
    raise SteeringError(field, f"a value of type {type(value).__name__} cannot be sent as JSON")


def _text(text: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = shown(text[error.start : error.start + 1])
        raise SteeringError(
            field, f"cannot be sent: character {error.start} is an unpaired surrogate, {found}"
        ) from None
    return text


def _has_layers(key: object) -> bool:
    return key in _LAYER_KEYS or (isinstance(key, str) and find_foreign_site(key) is not None)


def _pack(array: Any, field: str) -> Any:
    if _is_of_integers(array):  # positions or tokens
        return array.tolist()
    if len(array.shape) == 2:
        return pack_array(parse_matrix(array, field))
    return pack_vector(parse_vector(array, field))


def _number(array: Any, field: str) -> Any:
    """Return the number in an array without dimensions, such as a norm."""
    number = array.item()
    if not isinstance(number, (bool, int, float)):
        raise SteeringError(field, f"a number of dtype {array.dtype} cannot be sent as JSON")
    return to_json(number, field)


def _is_of_integers(array: Any) -> bool:
    if isinstance(array, np.ndarray):
        return array.dtype.kind in "iu"
    name = str(array.dtype).removeprefix("torch.")
    return name.removeprefix("u").startswith("int")
