# SPDX-License-Identifier: Apache-2.0
"""Packed arrays of the fork: the rows of one hook point in one array, and the table ``patch_vectors``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from vllm_steer.adapters import (
    MAX_EDITS,
    PACKED_KEYS,
    decode_packed,
    is_integer,
    pack_array,
    parse_vector,
    read_number,
    read_packed_dtype,
    shown,
)
from vllm_steer.errors import SteeringError

_PACKED_HOOK = frozenset((*PACKED_KEYS, "layer_indices", "scales"))


def read_hooks(value: Any, field: str) -> Any:
    """Return a vector field whose packed hook points, several layers in one array, are vectors by layer.

    Raises:
        SteeringError: A packed hook point is invalid.
    """
    if not isinstance(value, Mapping):
        return value
    packed = [each for each in value.values() if isinstance(each, Mapping) and "layer_indices" in each]
    # Counted before any row is decoded.
    counted = sum(len(each["layer_indices"]) for each in packed if isinstance(each["layer_indices"], (list, tuple)))
    if counted > MAX_EDITS:
        raise SteeringError(field, f"has {counted} packed rows; at most {MAX_EDITS} are accepted")
    return {
        point: _unpack(by_layer, f"{field}.{point}")
        if isinstance(by_layer, Mapping) and "layer_indices" in by_layer
        else by_layer
        for point, by_layer in value.items()
    }


def read_table(table: Any, field: str) -> list[dict[str, Any]]:
    """Return the rows of ``{dtype, shape, data}`` with the shape ``[rows, hidden]`` as packed vectors.

    Raises:
        SteeringError: The table is invalid.
    """
    if not isinstance(table, Mapping):
        raise SteeringError(field, f"must be a packed table with dtype, shape and data, not {shown(table)}")
    _num_rows(table, field)
    return _rows(table, field)


def _unpack(packed: Mapping[str, Any], field: str) -> dict[str, Any]:
    if not set(packed) <= _PACKED_HOOK:
        raise SteeringError(field, f"has the keys {', '.join(sorted(_PACKED_HOOK))}, not {shown(list(packed))}")
    table = {key: packed[key] for key in PACKED_KEYS if key in packed}
    count, layers, scales = _num_rows(table, field), packed["layer_indices"], packed.get("scales")
    if not isinstance(layers, (list, tuple)) or len(layers) != count or not all(map(is_integer, layers)):
        raise SteeringError(f"{field}.layer_indices", f"must be {count} layer numbers, not {shown(layers)}")
    if len(set(layers)) != len(layers):
        raise SteeringError(f"{field}.layer_indices", "names a layer twice; give it once")
    if scales is None:
        scales = [1.0] * count
    if not isinstance(scales, (list, tuple)) or len(scales) != count:
        raise SteeringError(f"{field}.scales", f"must be {count} numbers, not {shown(scales)}")
    return {
        str(layer): {"vector": row, "scale": read_number(scale, f"{field}.scales[{i}]")}
        for i, (layer, row, scale) in enumerate(zip(layers, _rows(table, field), scales, strict=True))
    }


def _num_rows(packed: Mapping[str, Any], field: str) -> int:
    """Check a table except for its data and return the number of its rows."""
    read_packed_dtype(packed, field)
    shape = packed["shape"]
    if not isinstance(shape, (list, tuple)) or len(shape) != 2 or not all(is_integer(n) and n > 0 for n in shape):
        raise SteeringError(f"{field}.shape", f"must be [rows, hidden], not {shown(shape)}")
    if shape[0] > MAX_EDITS:
        raise SteeringError(f"{field}.shape", f"has {shown(shape[0])} rows; at most {MAX_EDITS} are accepted")
    return int(shape[0])


def _rows(packed: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    count, width = map(int, packed["shape"])
    rows: npt.NDArray[Any] = decode_packed(
        packed["data"], count * width, read_packed_dtype(packed, field), f"{field}.data"
    )
    return [pack_array(parse_vector(row, f"{field}.data")) for row in rows.reshape(count, width)]
