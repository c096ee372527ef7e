# SPDX-License-Identifier: Apache-2.0
"""A module as a safetensors file: how it is uploaded, given at start and stored.

A vector of a tier is a tensor ``tier.point.layer`` (``base.post_block.12``), a probe is ``probes.name``; both are
``[H]`` of float32, float16, bfloat16 or float64. In the metadata, all optional: ``description`` and ``model`` as texts,
and as JSON ``provenance``, ``scales`` (tensor name to scale) and ``edits``, a list of edits whose ``vector`` is the
name of a tensor ``edits.anything``.

Data come from strangers: the header is checked before anything is read by it, and the content as any request's is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_EDITS
from vllm_steer.registry.about import ABOUT_KEYS, About, parse_about
from vllm_steer.registry.json_text import parse_json
from vllm_steer.registry.module import EDITS, MAX_PROBES, PROBES, TIERS, Module, parse_module
from vllm_steer.spec.scalars import shown
from vllm_steer.spec.vector import PACKED_DTYPES, from_bytes

MAX_HEADER = 4 << 20
"""Most bytes of a file's header."""
_SCALES = "scales"
_ENTRY = frozenset({"dtype", "shape", "data_offsets"})
"""What a header says of a tensor; safetensors would pass over anything else."""
_METADATA = (*ABOUT_KEYS, _SCALES, EDITS, "format")

DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "F32": PACKED_DTYPES["float32"],
        "F16": PACKED_DTYPES["float16"],
        "BF16": PACKED_DTYPES["bfloat16"],
        "F64": PACKED_DTYPES["float64"],
    }
)


def read_module(data: bytes) -> tuple[Module, About]:
    """The module in a safetensors file, and what the file says about it.

    Raises:
        SteeringError: the bytes are no such file, or what is in it is no module.
    """
    header = _header(data)
    metadata = header.pop("__metadata__", {})
    for key in metadata:
        if key not in _METADATA:
            raise SteeringError(f"metadata.{shown(key)}", f"is not known; a module's file has {', '.join(_METADATA)}")
    try:
        tensors = {name: _vector(name, tensor) for name, tensor in safetensors.deserialize(data)}  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise SteeringError("file", f"is not a sound safetensors file: {error}") from None
    content = _content(tensors, _parsed(metadata, _SCALES, dict) or {}, _parsed(metadata, EDITS, list) or [])
    about = {key: metadata.get(key) for key in ("description", "model")}
    return parse_module(content), parse_about({**about, "provenance": _parsed(metadata, "provenance", dict)})


def write_module(module: Module, about: About = About()) -> bytes:  # noqa: B008 - immutable
    """The file of a module; `read_module` is the inverse."""
    tensors: dict[str, np.ndarray] = {}
    scales: dict[str, float] = {}
    for tier in TIERS:
        for edit in getattr(module, tier):
            name = f"{tier}.{edit.point}.{edit.layers[0]}"
            tensors[name] = edit.vector
            if edit.strength != 1.0:
                scales[name] = edit.strength
    edits = []
    for i, edit in enumerate(module.edits):
        tensors[f"{EDITS}.{i}"] = edit.vector
        edits.append({**edit.to_wire(), "vector": f"{EDITS}.{i}"})
    tensors.update((f"{PROBES}.{name}", probe) for name, probe in module.probes.items())
    metadata = {"description": about.description, "provenance": json.dumps(about.provenance)}
    if about.model is not None:
        metadata["model"] = about.model
    return safetensors.numpy.save(tensors, {**metadata, _SCALES: json.dumps(scales), EDITS: json.dumps(edits)})


def _header(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise SteeringError("file", "is not a safetensors file: it is shorter than its header says")
    if size > MAX_HEADER:
        raise SteeringError("file", f"has a header of {size} bytes; {MAX_HEADER} is the most")
    header = parse_json(data[8 : 8 + size], "file")
    if not isinstance(header, dict):
        raise SteeringError("file", "is not a safetensors file: its header is not an object")
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise SteeringError("file", "has metadata that are not texts by name")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if len(tensors) > MAX_EDITS + MAX_PROBES:
        raise SteeringError("file", f"has {len(tensors)} tensors; {MAX_EDITS + MAX_PROBES} is the most")
    for name, entry in tensors.items():
        if not isinstance(entry, dict) or entry.keys() != _ENTRY:
            raise SteeringError(_shown_name(name), f"must have {', '.join(sorted(_ENTRY))}, and nothing else")
        dtype = entry["dtype"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise SteeringError(_shown_name(name), f"has dtype {shown(dtype)}; use one of {', '.join(DTYPES)}")
    return header


def _vector(name: str, tensor: Mapping[str, Any]) -> np.ndarray:
    shape = tuple(tensor["shape"])
    if len(shape) != 1:
        raise SteeringError(_shown_name(name), f"has shape {shown(list(shape))}; a vector has one dimension, [H]")
    return from_bytes(bytes(tensor["data"]), DTYPES[tensor["dtype"]])


def _parsed(metadata: Mapping[str, str], key: str, kind: type) -> Any:
    if key not in metadata:
        return None
    value = parse_json(metadata[key], f"metadata.{key}")
    if not isinstance(value, kind):
        raise SteeringError(f"metadata.{key}", f"must be JSON of a {kind.__name__}, not {shown(value)}")
    return value


def _content(tensors: dict[str, np.ndarray], scales: dict[str, Any], edits: list[Any]) -> dict[str, Any]:
    """What `parse_module` reads."""
    content: dict[str, Any] = {}
    of_edits = {name: vector for name, vector in tensors.items() if name.startswith(f"{EDITS}.")}
    for name, vector in tensors.items():
        if name in of_edits:
            continue
        part, _, rest = name.partition(".")
        point, _, layer = rest.rpartition(".")
        if part == PROBES and rest:
            content.setdefault(PROBES, {})[rest] = vector
        elif part in TIERS and point:
            scaled = {"vector": vector, "scale": scales.pop(name, 1.0)}
            content.setdefault(part, {}).setdefault(point, {})[layer] = scaled
        else:
            raise SteeringError(
                _shown_name(name), f"is no tensor of a module: {', '.join(f'{tier}.point.layer' for tier in TIERS)}, "
                f"{PROBES}.name or {EDITS}.anything"
            )  # fmt: skip
    if scales:
        raise SteeringError(f"metadata.{_SCALES}", f"{shown(next(iter(scales)))} is no tensor of a tier in the file")
    if edits or of_edits:
        content[EDITS] = [_with_vector(edit, of_edits, f"metadata.{EDITS}[{i}]") for i, edit in enumerate(edits)]
        unused = of_edits.keys() - {edit["vector"] for edit in edits}
        if unused:
            raise SteeringError(_shown_name(min(unused)), f"is named by no edit in the metadata's {EDITS}")
    return content


def _with_vector(edit: object, vectors: Mapping[str, np.ndarray], field: str) -> dict[str, Any]:
    name = edit.get("vector") if isinstance(edit, dict) else None
    if not isinstance(edit, dict) or not isinstance(name, str) or name not in vectors:
        raise SteeringError(f"{field}.vector", f"must name a tensor {EDITS}.anything of the file, not {shown(name)}")
    return {**edit, "vector": vectors[name]}


def _shown_name(name: str) -> str:
    return shown(name).strip("'") or "''"
