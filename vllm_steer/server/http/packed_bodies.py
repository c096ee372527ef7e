# SPDX-License-Identifier: Apache-2.0
"""Packing of vectors in request bodies.

vLLM reads bodies with Python's JSON parser, which takes longer for the numbers of one vector than for all other work in
front of the engine. Lists of numbers are therefore replaced by the packed form with the same float32 values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.request.edit_fields import SHORT_FIELDS
from vllm_steer.request.vector import pack_array, parse_vector

MIN_NUMBERS = 256
"""Shortest list that is packed."""


def pack_body(body: bytes, document: Mapping[str, Any]) -> bytes:
    """Return a body that has the same meaning, in which the vectors of the vector fields are packed.

    Args:
        body: The body.
        document: Its parsed form, without duplicate keys.

    Returns:
        ``body`` itself if it has no long list of numbers there. Invalid vectors stay as they are, so that their errors
        name the invalid number.
    """
    changed = False

    def pack(vector: Any) -> Any:
        nonlocal changed
        if not isinstance(vector, list) or len(vector) < MIN_NUMBERS:
            return vector
        try:
            packed = pack_array(parse_vector(vector))
        except SteeringError:
            return vector
        changed = True
        return packed

    fields = {name: map_vectors(document[name], pack) for name in SHORT_FIELDS if name in document}
    return msgspec.json.encode({**document, **fields}) if changed else body


def map_vectors(by_point: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``{point: {layer: vector}}`` with changed vectors; other values stay as they are."""
    if not isinstance(by_point, dict):
        return by_point
    return {point: _map_layers(layers, change) for point, layers in by_point.items()}


def _map_layers(by_layer: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(by_layer, dict):
        return by_layer
    return {
        layer: {**given, "vector": change(given["vector"])}
        if isinstance(given, dict) and "vector" in given
        else change(given)
        for layer, given in by_layer.items()
    }
