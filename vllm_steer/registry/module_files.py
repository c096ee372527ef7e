# SPDX-License-Identifier: Apache-2.0
"""Safetensors files of modules, for uploads, ``--steering-modules`` and storage.

Tensor ``tier.point.layer`` (``base.post_block.12``) is a vector of a tier, and ``probes.name`` is a probe. Both have
shape ``[H]`` and dtype float32, float16, bfloat16 or float64. A probe with a hidden layer has the tensors
``mlp_probes.name.weights`` ``[n, H]``, ``mlp_probes.name.outputs`` ``[n]`` and, if wanted, ``mlp_probes.name.biases``.
All metadata are optional: ``description`` and ``model`` are strings; ``provenance``, ``scales`` (scale by tensor name),
``activations`` (activation by the name of a probe), ``probes`` (``bias``, ``sigmoid``, ``point`` and ``layer`` by the
name of a probe) and ``edits`` are JSON. ``edits`` is a list of edits whose ``vector`` is the name of a tensor
``edits.anything``.

Files are untrusted: the header is validated before it is used, and the content like that of any request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

from vllm_steer.errors import SteeringError
from vllm_steer.registry.metadata import METADATA_KEYS, ModuleMetadata, parse_metadata
from vllm_steer.registry.module import EDITS, PROBES, TIERS, Module, parse_module
from vllm_steer.request.probe import ARRAYS as MLP_ARRAYS
from vllm_steer.request.probe import READING, HiddenLayer
from vllm_steer.request.scalars import parse_json, shown, shown_name
from vllm_steer.vectors.containers import MAX_HEADER_BYTES, Container, open_safetensors

_SCALES, _ACTIVATIONS = "scales", "activations"
MLP_PROBES = "mlp_probes"
_FILE_METADATA_KEYS = (*METADATA_KEYS, _SCALES, _ACTIVATIONS, PROBES, EDITS, "format")


def read_module(data: bytes) -> tuple[Module, ModuleMetadata]:
    """Parse a safetensors file.

    Raises:
        SteeringError: The file is damaged or does not contain a valid module.
    """
    return module_of(open_safetensors(data))


def module_of(file: Container) -> tuple[Module, ModuleMetadata]:
    """Return the module in an opened safetensors file; raise SteeringError if it does not contain a valid one."""
    metadata, tensors = file.fields, dict(file.content)
    for key in metadata:
        if key not in _FILE_METADATA_KEYS:
            raise SteeringError(f"metadata.{shown(key)}", f"unknown key; use one of {', '.join(_FILE_METADATA_KEYS)}")
    for name, tensor in tensors.items():
        _check_shape(name, tensor)
    activations = _json(metadata, _ACTIVATIONS, dict) or {}
    mlps = _mlp_probes(tensors, activations)
    content = _content(tensors, _json(metadata, _SCALES, dict) or {}, _json(metadata, EDITS, list) or [])
    if mlps:
        probes = content.setdefault(PROBES, {})
        if twice := min(mlps.keys() & probes.keys(), default=None):
            raise SteeringError(shown_name(f"{PROBES}.{twice}"), f"is also in {MLP_PROBES}; use another name")
        probes.update(mlps)
    _add_readings(content.get(PROBES, {}), _json(metadata, PROBES, dict) or {})
    provenance = _json(metadata, "provenance", dict)
    return parse_module(content), parse_metadata({**metadata, "provenance": provenance})


def write_module(module: Module, metadata: ModuleMetadata = ModuleMetadata()) -> bytes:  # noqa: B008 - immutable
    """Return the safetensors file of a module; `read_module` is the inverse.

    Raises:
        SteeringError: `read_module` would refuse the file, because its header is too large.
    """
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
    activations = {}
    for name, probe in module.probes.items():
        if isinstance(probe.weights, HiddenLayer):
            tensors.update((f"{MLP_PROBES}.{name}.{key}", array) for key, array in probe.weights.arrays.items())
            activations[name] = probe.weights.activation
        else:
            tensors[f"{PROBES}.{name}"] = probe.weights
    strings = {"description": metadata.description, "provenance": json.dumps(metadata.provenance)}
    if readings := {name: probe.reading for name, probe in module.probes.items() if probe.reading}:
        strings[PROBES] = json.dumps(readings)
    if activations:
        strings[_ACTIVATIONS] = json.dumps(activations)
    if metadata.model is not None:
        strings["model"] = metadata.model
    data = safetensors.numpy.save(tensors, {**strings, _SCALES: json.dumps(scales), EDITS: json.dumps(edits)})
    size = int.from_bytes(data[:8], "little")
    if size > MAX_HEADER_BYTES:
        raise SteeringError(
            "module",
            f"needs a file with a header of {size} bytes; at most {MAX_HEADER_BYTES} are allowed. List fewer positions "
            "in the tokens of its edits, or write [start, stop] pairs",
        )
    return data


def _check_shape(name: str, tensor: np.ndarray) -> None:
    is_matrix = name.startswith(f"{MLP_PROBES}.") and name.endswith(".weights")
    if tensor.ndim != 1 + is_matrix:
        needed = "weights must have shape [n, H]" if is_matrix else "a vector must have shape [H]"
        raise SteeringError(shown_name(name), f"has shape {shown(list(tensor.shape))}; {needed}")


_JSON_NAMES: Mapping[type, str] = {dict: "object", list: "array"}


def _json(metadata: Mapping[str, str], key: str, kind: type) -> Any:
    if key not in metadata:
        return None
    value = parse_json(metadata[key], f"metadata.{key}")
    if not isinstance(value, kind):
        raise SteeringError(f"metadata.{key}", f"must be a JSON {_JSON_NAMES[kind]}, not {shown(value)}")
    return value


def _mlp_probes(tensors: dict[str, np.ndarray], activations: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Take the tensors of probes with a hidden layer out of ``tensors`` and return the probes by name."""
    probes: dict[str, dict[str, Any]] = {}
    for tensor in [name for name in tensors if name.startswith(f"{MLP_PROBES}.")]:
        name, _, array = tensor.removeprefix(f"{MLP_PROBES}.").rpartition(".")
        if not name or array not in MLP_ARRAYS:
            names = ", ".join(f"{MLP_PROBES}.name.{each}" for each in MLP_ARRAYS)
            raise SteeringError(shown_name(tensor), f"unknown tensor name; use {names}")
        probes.setdefault(name, {})[array] = tensors.pop(tensor)
    for name, activation in activations.items():
        if name not in probes:
            raise SteeringError(f"metadata.{_ACTIVATIONS}", f"{shown(name)} names no probe in {MLP_PROBES} of the file")
        probes[name]["activation"] = activation
    for name, probe in probes.items():
        # An array without the weights would be read as a vector.
        for array in ("weights", "outputs"):
            if array not in probe:
                raise SteeringError(shown_name(f"{MLP_PROBES}.{name}.{array}"), "is missing from the file")
    return probes


def _add_readings(probes: dict[str, Any], readings: Mapping[str, Any]) -> None:
    """Add bias, sigmoid, point and layer to the probes of a file."""
    path = f"metadata.{PROBES}"
    for name, reading in readings.items():
        if name not in probes:
            raise SteeringError(path, f"{shown(name)} names no probe of the file")
        if not isinstance(reading, dict) or not reading.keys() <= set(READING):
            problem = f"must be an object with some of {', '.join(READING)}, not {shown(reading)}"
            raise SteeringError(f"{path}.{shown_name(name)}", problem)
        probe = probes[name]
        probes[name] = {**(probe if isinstance(probe, dict) else {"weights": probe}), **reading}


def _content(tensors: dict[str, np.ndarray], scales: dict[str, Any], edits: list[Any]) -> dict[str, Any]:
    """Return the content in the form that `parse_module` reads."""
    content: dict[str, Any] = {}
    edit_vectors = {name: vector for name, vector in tensors.items() if name.startswith(f"{EDITS}.")}
    for name, vector in tensors.items():
        if name in edit_vectors:
            continue
        part, _, rest = name.partition(".")
        point, _, layer = rest.rpartition(".")
        if part == PROBES and rest:
            content.setdefault(PROBES, {})[rest] = vector
        elif part in TIERS and point:
            scaled = {"vector": vector, "scale": scales.pop(name, 1.0)}
            content.setdefault(part, {}).setdefault(point, {})[layer] = scaled
        else:
            names = ", ".join(f"{tier}.point.layer" for tier in TIERS)
            problem = f"unknown tensor name; use {names}, {PROBES}.name, {MLP_PROBES}.name.weights or {EDITS}.anything"
            raise SteeringError(shown_name(name), problem)
    if scales:
        raise SteeringError(
            f"metadata.{_SCALES}",
            f"{shown(next(iter(scales)))} names no tensor base.*, prefill.* or decode.* of the file",
        )
    if edits or edit_vectors:
        content[EDITS] = [_with_vector(edit, edit_vectors, f"metadata.{EDITS}[{i}]") for i, edit in enumerate(edits)]
        unused = edit_vectors.keys() - {edit["vector"] for edit in edits}
        if unused:
            raise SteeringError(shown_name(min(unused)), f"is not used by any edit in metadata.{EDITS}")
    return content


def _with_vector(edit: object, vectors: Mapping[str, np.ndarray], field: str) -> dict[str, Any]:
    name = edit.get("vector") if isinstance(edit, dict) else None
    if not isinstance(edit, dict) or not isinstance(name, str) or name not in vectors:
        raise SteeringError(f"{field}.vector", f"must name a tensor {EDITS}.anything of the file, not {shown(name)}")
    return {**edit, "vector": vectors[name]}
