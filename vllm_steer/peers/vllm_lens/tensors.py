# SPDX-License-Identifier: Apache-2.0
"""The JSON form of tensors in vllm-lens: base64 of zstd-compressed bytes, bfloat16 as int16."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

import torch

from vllm_steer.errors import SteeringError
from vllm_steer.extras import install_hint
from vllm_steer.spec.scalars import is_integer, shown

_STORED: dict[torch.dtype, torch.dtype] = {torch.bfloat16: torch.int16}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int16)
}
_MAX_BYTES = 1 << 30


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
        tensor: A CPU tensor of a floating dtype.
        compression: ``"zstd"``, which needs the extra ``vllm-lens``, or None.

    Raises:
        SteeringError: ``zstandard`` is not installed.
    """
    data = tensor_bytes(tensor)
    return {
        "data": base64.b64encode(zstd().compress(data) if compression == "zstd" else data).decode("ascii"),
        "dtype": str(_STORED.get(tensor.dtype, tensor.dtype)).removeprefix("torch."),
        "original_dtype": str(tensor.dtype).removeprefix("torch."),
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
    missing = [key for key in ("data", "dtype", "shape") if key not in wire]
    if missing:
        raise SteeringError(f"{field}.{missing[0]}", "is missing; a tensor has data, dtype and shape")
    name = str(wire.get("original_dtype") or wire["dtype"]).removeprefix("torch.")
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise SteeringError(f"{field}.original_dtype", f"{shown(name)} is not valid; use one of {', '.join(_DTYPES)}")
    stored = str(_STORED.get(dtype, dtype)).removeprefix("torch.")
    if str(wire["dtype"]).removeprefix("torch.") not in (name, stored):
        raise SteeringError(f"{field}.dtype", f"is {shown(wire['dtype'])}; {name} is stored as {stored}")
    shape = wire["shape"]
    if not isinstance(shape, (list, tuple)) or not all(is_integer(size) and size >= 0 for size in shape):
        raise SteeringError(f"{field}.shape", f"must be a list of sizes, not {shown(shape)}")
    size = math.prod(shape) * dtype.itemsize
    if size > _MAX_BYTES:
        raise SteeringError(f"{field}.shape", f"is {size} bytes; at most {_MAX_BYTES} are accepted")
    data = read_bytes(wire["data"], wire.get("compression"), size, field)
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(list(shape))


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
    """Return at most ``size + 1`` decompressed bytes, so that a small body cannot fill the memory.

    Raises:
        SteeringError: ``raw`` is not a zstd frame.
    """
    module = zstd()
    try:
        with module.ZstdDecompressor(max_window_size=1 << 27).stream_reader(raw) as reader:
            data: bytes = reader.read(size + 1)
            return data
    except module.ZstdError as error:
        raise SteeringError(field, f"is not valid zstd data: {shown(str(error))}") from None


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
