# SPDX-License-Identifier: Apache-2.0
"""The JSON form of tensors in vllm-lens: base64 of zstd-compressed bytes, bfloat16 as int16."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

import torch

from vllm_steer.adapters import install_hint, is_integer, shown
from vllm_steer.errors import SteeringError

_DTYPES: dict[str, tuple[torch.dtype, str]] = {
    "torch.float32": (torch.float32, "float32"),
    "torch.float16": (torch.float16, "float16"),
    "torch.bfloat16": (torch.bfloat16, "int16"),
    "torch.float64": (torch.float64, "float64"),
}
"""Dtype and name of numpy's storage dtype by ``original_dtype``. Clients compare these names as texts."""
_KEYS = frozenset(("data", "dtype", "original_dtype", "shape", "compression"))
_MAX_DIMENSIONS = 8
MAX_BYTES = 1 << 30
"""Most bytes of the tensors of one request, without a server's limit."""


def zstd() -> Any:
    """Return the module ``zstandard``.

    Raises:
        SteeringError: It is not installed.
    """
    try:
        import zstandard
    except ImportError:
        raise SteeringError("zstandard", f"is not installed; {install_hint('vllm-lens')}") from None
    return zstandard


def serialize_tensor(tensor: torch.Tensor, *, compression: str | None = "zstd") -> dict[str, Any]:
    """Return the JSON form of a tensor.

    Args:
        tensor: A CPU tensor of dtype float32, float16, bfloat16 or float64.
        compression: ``"zstd"``, which needs the extra ``vllm-lens``, or None.

    Raises:
        SteeringError: The form does not have the dtype, or ``zstandard`` is not installed.
    """
    described = describe(tensor, compression)
    data = tensor_bytes(tensor)
    data = zstd().compress(data) if compression == "zstd" else data
    return {"data": base64.b64encode(data).decode("ascii"), **described}


def describe(tensor: torch.Tensor, compression: str | None = "zstd") -> dict[str, Any]:
    """Return the JSON form of a tensor without its data; raise SteeringError if the form does not have the dtype."""
    name = str(tensor.dtype)
    if name not in _DTYPES:
        raise SteeringError("tensor", f"has dtype {name}; use one of {', '.join(_DTYPES)}")
    return {
        "dtype": _DTYPES[name][1],
        "original_dtype": name,
        "shape": list(tensor.shape),
        "compression": compression,
    }


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements of a CPU tensor in memory order."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def deserialize_tensor(wire: Mapping[str, Any], field: str = "tensor") -> torch.Tensor:
    """Return the tensor of a JSON form.

    Args:
        wire: A result of :func:`serialize_tensor`.
        field: Path of the value, for errors.

    Raises:
        SteeringError: ``wire`` has another form, or ``zstandard`` is needed and not installed.
    """
    dtype, size = measure(wire, field)
    if max(size, *wire["shape"], 0) > MAX_BYTES:  # torch also refuses large axes of an empty tensor
        raise SteeringError(f"{field}.shape", f"is of more than {MAX_BYTES} bytes, the most that are accepted")
    data = read_bytes(wire["data"], wire.get("compression"), size, field)
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape([int(each) for each in wire["shape"]])


def measure(wire: Mapping[str, Any], field: str) -> tuple[torch.dtype, int]:
    """Check a JSON form except for its data, and return the dtype and the size in bytes.

    Raises:
        SteeringError: A key is missing, unknown or invalid.
    """
    for key in ("data", "dtype", "shape"):
        if key not in wire:
            raise SteeringError(f"{field}.{key}", "is missing; a tensor has data, dtype and shape")
    for key in wire:
        if key not in _KEYS:
            raise SteeringError(f"{field}.{shown(key)}", f"is not a key of a tensor; use {', '.join(sorted(_KEYS))}")
    given = wire.get("original_dtype") or wire["dtype"]
    name = f"torch.{str(given)[:64].removeprefix('torch.')}"
    if name not in _DTYPES:
        key = "original_dtype" if wire.get("original_dtype") else "dtype"
        raise SteeringError(f"{field}.{key}", f"{shown(given)} is not valid; use one of {', '.join(_DTYPES)}")
    dtype, stored = _DTYPES[name]
    if wire["dtype"] not in (name, name.removeprefix("torch."), stored):
        raise SteeringError(f"{field}.dtype", f"is {shown(wire['dtype'])}; {name} is stored as {stored}")
    shape = wire["shape"]
    if not isinstance(shape, (list, tuple)) or not all(is_integer(size) and size >= 0 for size in shape):
        raise SteeringError(f"{field}.shape", f"must be a list of sizes, not {shown(shape)}")
    if len(shape) > _MAX_DIMENSIONS:
        raise SteeringError(f"{field}.shape", f"has {len(shape)} dimensions; at most {_MAX_DIMENSIONS} are accepted")
    return dtype, math.prod(map(int, shape)) * dtype.itemsize


def read_bytes(data: object, compression: object, size: int, field: str) -> bytes:
    """Return the ``size`` bytes of base64 text, decompressed.

    Raises:
        SteeringError: The text is not base64, or has another size.
    """
    if not isinstance(data, str):
        raise SteeringError(f"{field}.data", f"must be a base64 string, not {type(data).__name__}")
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SteeringError(f"{field}.data", f"is not valid base64: {error}") from None
    if compression == "zstd":
        raw = decompress(raw, size, f"{field}.data")
    elif compression is not None:
        raise SteeringError(f"{field}.compression", f"must be zstd or null, not {shown(compression)}")
    if len(raw) != size:
        raise SteeringError(f"{field}.data", f"has {len(raw)} bytes; dtype and shape need {size}")
    return raw


def decompress(raw: bytes, size: int, field: str) -> bytes:
    """Return the ``size`` bytes of a zstd frame. No more memory than that is used, so a small body cannot fill it.

    Raises:
        SteeringError: ``raw`` is not one zstd frame of that size.
    """
    module = zstd()
    try:
        # A frame may have no content size, which is then -1. Otherwise the decompressor allocates it.
        known: int = module.frame_content_size(raw)
        if known not in (-1, size):
            raise SteeringError(field, f"has {known} bytes; dtype and shape need {size}")
        data: bytes = module.ZstdDecompressor().decompress(raw, max_output_size=max(size, 1), allow_extra_data=False)
    except (module.ZstdError, ValueError) as error:
        if isinstance(error, SteeringError):
            raise
        raise SteeringError(field, f"is not valid zstd data of {size} bytes: {shown(str(error))}") from None
    return data


def decode_activations(activations: Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
    """Return the tensors of the ``activations`` of an HTTP response; other entries are left out."""
    return {
        name: deserialize_tensor(value, f"activations.{name}")
        for name, value in (activations or {}).items()
        if isinstance(value, Mapping) and "data" in value
    }


def stack_layers(sites: dict[tuple[str, int], torch.Tensor]) -> torch.Tensor:
    """Return the rows of ``post_block`` as ``[layers, positions, hidden]``, layers ascending.

    Raises:
        SteeringError: There are none.
    """
    layers = sorted(layer for point, layer in sites if point == "post_block")
    if not layers:
        raise SteeringError("capture", "has no rows of post_block")
    return torch.stack([sites["post_block", layer] for layer in layers])
