# SPDX-License-Identifier: Apache-2.0
"""Translation of the fork's request fields to those of this project."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.peers.rhizonymph.captures import read_captures
from vllm_steer.peers.rhizonymph.gates import NO_CONVERSATION, compile_gates, is_gate
from vllm_steer.spec.scalars import is_integer, read_number, shown
from vllm_steer.spec.vector import decode_packed, pack_array, parse_vector, read_packed_dtype

VECTOR_FIELDS = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")
"""Vector fields of requests."""
MODULE_FIELDS: Mapping[str, str] = {"vectors": "base", "prefill_vectors": "prefill", "decode_vectors": "decode"}
"""Vector fields of modules and of ``/v1/steering/set`` by the fork's names."""
REFUSED: Mapping[str, str] = {
    "steering_clamps": "is not supported; use steering with kind clamp",
    "steering_module_ref": "is not supported; register the module and name it in steering_name",
    "conversation_id": NO_CONVERSATION,
}
"""Fields that are not served, with what to do instead."""
_SITE_KEYS = frozenset(
    (
        "layer", "hook", "dest_position", "source_run", "source_position", "source_module", "source_inline", "alpha",
        "mask",
    )
)  # fmt: skip
_NO_SOURCE = {
    "source_run": "runs are not kept; capture the source first and send its row as source_inline, or use "
    "/v1/steering/patch",
    "source_module": "is not supported; send the row as source_inline",
}
_PACKED_HOOK = frozenset(("dtype", "shape", "layer_indices", "data", "scales"))
FIELDS = (
    "steering", "patch_sites", "patch_vectors", "steering_name", "capture_wait", "capture", *VECTOR_FIELDS,
    *REFUSED,
)  # fmt: skip
"""Fields that the translation reads; others are passed on."""


def translate_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request in the form of this project; fields that need no translation stay as they are.

    Args:
        given: Values by field, as Python or JSON values.

    Raises:
        SteeringError: A field is invalid or not served.

    Examples:
        >>> from vllm_steer.peers.rhizonymph import translate_fields
        >>> site = {"layer": 3, "hook": "post_block", "dest_position": 2, "source_inline": [1.0, 2.0], "alpha": 0.5}
        >>> translate_fields({"patch_sites": [site]})["steering"][0]["tokens"]
        [2]
    """
    fields = {name: value for name, value in given.items() if value is not None or name not in FIELDS}
    for name, advice in REFUSED.items():
        if name in fields:
            raise SteeringError(name, advice)
    if fields.pop("capture_wait", True) is not True:
        raise SteeringError("capture_wait", "must be true; the response waits for the consumers")
    if "capture" in fields:
        fields["capture"] = read_captures(fields["capture"])
    for name in VECTOR_FIELDS:
        if name in fields:
            fields[name] = read_hooks(fields[name], name)
    if "steering_name" in fields:
        name = fields.pop("steering_name")
        if "steering_modules" in fields:
            raise SteeringError("steering_name", "and steering_modules name modules; send one of them")
        fields["steering_modules"] = [name]
    steering = fields.get("steering")
    if isinstance(steering, (list, tuple)) and any(map(is_gate, steering)):
        fields["steering"], readouts = compile_gates(steering)
        if readouts:
            fields["readouts"] = {**(fields.get("readouts") or {}), **readouts}
    patches = read_patches(fields.pop("patch_sites", None), fields.pop("patch_vectors", None))
    if patches:
        fields["steering"] = [*(fields.get("steering") or ()), *patches]
    return fields


def read_hooks(value: Any, field: str) -> Any:
    """Return a vector field whose packed hook points, several layers in one array, are vectors by layer.

    Raises:
        SteeringError: A packed hook point is invalid.
    """
    if not isinstance(value, Mapping):
        return value
    return {
        point: _unpack(by_layer, f"{field}.{point}")
        if isinstance(by_layer, Mapping) and "layer_indices" in by_layer
        else by_layer
        for point, by_layer in value.items()
    }


def _unpack(packed: Mapping[str, Any], field: str) -> dict[str, Any]:
    if not set(packed) <= _PACKED_HOOK:
        raise SteeringError(field, f"has the keys {', '.join(sorted(_PACKED_HOOK))}, not {shown(list(packed))}")
    dtype = read_packed_dtype({key: packed.get(key) for key in ("dtype", "shape", "data")}, field)
    shape, layers = packed["shape"], packed["layer_indices"]
    if not isinstance(shape, (list, tuple)) or len(shape) != 2 or not all(is_integer(n) and n > 0 for n in shape):
        raise SteeringError(f"{field}.shape", f"must be [layers, hidden], not {shown(shape)}")
    if not isinstance(layers, (list, tuple)) or len(layers) != shape[0] or not all(map(is_integer, layers)):
        raise SteeringError(f"{field}.layer_indices", f"must be {shape[0]} layer numbers, not {shown(layers)}")
    if len(set(layers)) != len(layers):
        raise SteeringError(f"{field}.layer_indices", "names a layer twice; give it once")
    scales = packed.get("scales")
    if scales is None:
        scales = [1.0] * len(layers)
    if not isinstance(scales, (list, tuple)) or len(scales) != len(layers):
        raise SteeringError(f"{field}.scales", f"must be {len(layers)} numbers, not {shown(scales)}")
    rows = decode_packed(packed["data"], int(shape[0] * shape[1]), dtype, f"{field}.data").reshape(shape)
    return {
        str(layer): {
            "vector": pack_array(parse_vector(np.asarray(row), f"{field}.data")),
            "scale": read_number(scale, f"{field}.scales[{i}]"),
        }
        for i, (layer, row, scale) in enumerate(zip(layers, rows, scales, strict=True))
    }


def read_patches(sites: Any, vectors: Any) -> list[dict[str, Any]]:
    """Return the edits of ``patch_sites``.

    Args:
        sites: The field ``patch_sites``.
        vectors: The field ``patch_vectors``: rows by name, or a list of rows.

    Raises:
        SteeringError: A site is invalid or has a source that is not served.
    """
    if sites is None:
        if vectors is not None:
            raise SteeringError("patch_vectors", "has no effect without patch_sites")
        return []
    if not isinstance(sites, (list, tuple)):
        raise SteeringError("patch_sites", f"must be a list of sites, not {shown(sites)}")
    return [_patch(site, vectors, f"patch_sites[{i}]") for i, site in enumerate(sites)]


def _patch(site: Any, vectors: Any, field: str) -> dict[str, Any]:
    if not isinstance(site, Mapping) or not set(site) <= _SITE_KEYS:
        raise SteeringError(field, f"must be an object with {', '.join(sorted(_SITE_KEYS))}, not {shown(site)}")
    for name, advice in _NO_SOURCE.items():
        if site.get(name) is not None:
            raise SteeringError(f"{field}.{name}", advice)
    if site.get("mask") is not None:
        raise SteeringError(f"{field}.mask", "is not supported; use steering with kind replace and subspace")
    for name in ("layer", "hook", "dest_position", "source_inline"):
        if site.get(name) is None:
            raise SteeringError(f"{field}.{name}", "is missing")
    if not is_integer(site["dest_position"]):
        raise SteeringError(f"{field}.dest_position", f"must be a position, not {shown(site['dest_position'])}")
    row = site["source_inline"]
    if isinstance(row, str) or is_integer(row):
        try:
            row = vectors[row]
        except (KeyError, IndexError, TypeError):
            raise SteeringError(f"{field}.source_inline", f"{shown(row)} is not in patch_vectors") from None
    return {
        "kind": "replace",
        "point": site["hook"],
        "layers": site["layer"],
        "vector": row,
        "strength": site.get("alpha", 1.0),
        "tokens": [site["dest_position"]],
    }
