# SPDX-License-Identifier: Apache-2.0
"""Steering vectors: parsing of all accepted forms to immutable float32 arrays.

The packed form for JSON is ``{"dtype": ..., "shape": [H], "data": ...}``. ``data`` holds the components in
little-endian order, base64-encoded (RFC 4648, with padding, without line breaks).
"""

import base64
import binascii
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_WIDTH
from vllm_steer.request.scalars import FLOAT32_MAX, is_integer, read_choice, shown

if TYPE_CHECKING:
    import torch

Vector: TypeAlias = npt.NDArray[np.float32]
VectorInput: TypeAlias = "Sequence[float] | npt.NDArray[Any] | torch.Tensor | Mapping[str, object]"

PackedDtype = Literal["float32", "float16", "bfloat16", "float64"]

_WIRE_DTYPE = np.dtype("<f4")

# Storage type of each packed dtype. numpy has no bfloat16, which is the upper half of a float32.
PACKED_DTYPES: Mapping[PackedDtype, np.dtype[Any]] = MappingProxyType(
    {
        "float32": np.dtype("<f4"),
        "float16": np.dtype("<f2"),
        "bfloat16": np.dtype("<u2"),
        "float64": np.dtype("<f8"),
    }
)


class PackedVector(msgspec.Struct, forbid_unknown_fields=True):
    """A packed vector: its components in little-endian order, base64-encoded."""

    dtype: Annotated[PackedDtype, msgspec.Meta(description="Type of the components.")]
    shape: Annotated[list[int], msgspec.Meta(description="`[H]`, the model's hidden size.")]
    data: Annotated[str, msgspec.Meta(description="The bytes (RFC 4648, with padding, without line breaks).")]


PACKED_KEYS = frozenset(PackedVector.__struct_fields__)

VectorForm = Annotated[
    Annotated[list[float], msgspec.Meta(min_length=1, max_length=MAX_WIDTH)] | PackedVector,
    msgspec.Meta(description="A vector of the model's hidden size."),
]
"""JSON form of a vector."""


def content_digest(data: bytes | memoryview) -> bytes:
    """Return the 16-byte digest that identifies a vector by its little-endian float32 bytes.

    Every vector of every request is hashed, so this is BLAKE3: many processors have no instructions for SHA-256.
    """
    return blake3(data).digest(length=16)


def parse_vector(value: object, field: str = "vector") -> Vector:
    """Parse a steering vector.

    Args:
        value: A list or tuple of numbers, a numpy array, a torch tensor on any device, or the packed form;
            one-dimensional, 1 to 65536 components, any real dtype.
        field: Path of the value, for errors.

    Returns:
        A float32 array ``[H]``: C-contiguous, finite, read-only, sharing no writeable memory.

    Raises:
        SteeringError: ``value`` has another form.
    """
    if isinstance(value, np.ndarray):
        array = _checked_array(value, field)
    elif isinstance(value, (list, tuple)):
        array = _from_numbers(value, field)
    elif isinstance(value, Mapping):
        array = _from_packed(value, field)
    elif _is_tensor(value):
        array = _from_tensor(value, field)
    else:
        raise SteeringError(
            field,
            "must be a list of numbers, a numpy array, a torch tensor or a packed vector (dtype, shape, data), "
            f"not {shown(value)} ({type(value).__name__})"
            + ("; load a file first, e.g. with numpy.load or torch.load" if isinstance(value, str) else ""),
        )
    return _frozen(array, field)


class ByContent:
    """Base of immutable values, which are equal if their content is, and which the constructor copies and unpickles."""

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments that make an equal value."""
        raise NotImplementedError

    def _content(self) -> object:
        """Return what equality and hash depend on."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return self._content() == other._content() if isinstance(other, type(self)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content())

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor, because an unpickled array would be writeable.
        return partial(type(self), **self._arguments()), ()


def width_error(field: str, width: int, other: str, other_width: int) -> SteeringError:
    """Return the error for a vector of another width than the vector in the field ``other``."""
    return SteeringError(
        field,
        f"has a vector of width {width}, but {other} has width {other_width}; all vectors have the model's hidden size",
    )


def bytes_of(vector: Vector) -> bytes:
    """Return the little-endian float32 bytes of a parsed vector, without a copy if the array is a view of them."""
    base: object = vector.base
    if vector.dtype == _WIRE_DTYPE and isinstance(base, bytes) and len(base) == vector.nbytes:
        return base
    return vector.astype(_WIRE_DTYPE).tobytes()


def unit_vector(vector: Vector) -> Vector:
    """Return a parsed vector at length 1, or zeros as they are.

    The norm is taken in float64, in which squares of float32 numbers neither underflow nor overflow.
    """
    wide = vector.astype(np.float64)
    return np.ascontiguousarray(wide / (np.linalg.norm(wide) or 1.0), dtype=_WIRE_DTYPE)


def pack_vector(vector: npt.ArrayLike) -> dict[str, object]:
    """Return the packed float32 form of a vector ``[H]``."""
    return pack_array(parse_vector(np.asarray(vector)))


def pack_array(array: Vector) -> dict[str, object]:
    """Return the packed form of a parsed vector ``[H]`` or matrix ``[n, H]``."""
    data = base64.b64encode(array.astype("<f4", copy=False).tobytes()).decode("ascii")
    return {"dtype": "float32", "shape": list(array.shape), "data": data}


def to_builtins(value: Any) -> object:
    """Return a checked value in JSON types: arrays packed, tuples as lists, other objects as their own wire form."""
    if isinstance(value, np.ndarray):
        return pack_array(value)
    if isinstance(value, tuple):
        return [to_builtins(each) for each in value]
    return value.to_wire() if hasattr(value, "to_wire") else value


def _frozen(array: npt.NDArray[Any], field: str) -> Vector:
    vector: Vector
    if array.dtype == np.float32:
        vector = np.ascontiguousarray(array)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            vector = array.astype(np.float32, order="C")
    finite = np.isfinite(vector)
    if np.count_nonzero(finite) != finite.size:  # faster than `all`; every vector of every request is checked
        index = int(finite.argmin())
        raise SteeringError(
            f"{field}[{index}]",
            f"is {vector[index]} in float32; components must be finite and at most {FLOAT32_MAX:.3g}",
        )
    # A view of a bytes object is immutable for good, because its writeable flag cannot be set. Such an array can be
    # shared without a copy.
    base: object = vector.base
    if isinstance(base, bytes):
        return vector
    return np.frombuffer(vector.tobytes(), np.float32)


def _check_shape(shape: tuple[int, ...], field: str) -> None:
    if len(shape) == 2 and shape[0] == 1:
        raise SteeringError(
            field, f"has shape {shown(list(shape))}; a vector has shape [H]; pass its only row, vector[0]"
        )
    if len(shape) != 1:
        hint = ""
        if len(shape) == 2:
            hint = "; flatten it" if shape[1] == 1 else "; for a vector per layer, pass vector[i] for layer i"
        raise SteeringError(field, f"has shape {shown(list(shape))}; a vector has one dimension, [H]{hint}")
    if not 1 <= shape[0] <= MAX_WIDTH:
        raise SteeringError(field, f"has {shown(shape[0])} components; a vector has 1 to {MAX_WIDTH}")


def _checked_array(array: npt.NDArray[Any], field: str) -> npt.NDArray[Any]:
    if isinstance(array, np.ma.MaskedArray):
        raise SteeringError(field, "is a masked array; fill the masked components first, e.g. .filled(0)")
    if array.dtype.kind not in "fiu":
        raise SteeringError(field, f"has dtype {array.dtype}; use a real floating or integer dtype, e.g. float32")
    _check_shape(array.shape, field)
    return array


def _from_numbers(numbers: Sequence[object], field: str) -> npt.NDArray[Any]:
    if len(numbers) > 0 and isinstance(numbers[0], (list, tuple)):
        raise SteeringError(field, "is a nested list; a vector is one flat list of numbers")
    _check_shape((len(numbers),), field)
    # numpy silently converts booleans and numeric strings. Checking the set of types is much cheaper than checking
    # each number.
    kinds = (float, int, np.floating, np.integer)
    wrong = {kind for kind in set(map(type, numbers)) if kind is bool or not issubclass(kind, kinds)}
    if wrong:
        index = next(i for i, number in enumerate(numbers) if type(number) in wrong)
        raise SteeringError(
            f"{field}[{index}]",
            f"must be a number, not {shown(numbers[index])} ({type(numbers[index]).__name__})"
            + ("; pass one array or tensor instead of a list" if hasattr(numbers[index], "shape") else ""),
        )
    try:
        with np.errstate(over="ignore"):
            return np.array(numbers, dtype=np.float32)
    except (OverflowError, TypeError, ValueError) as error:
        raise SteeringError(field, f"cannot be read as float32 numbers: {error}") from None


def _is_tensor(value: object) -> bool:
    # A caller that passes a tensor has imported torch; do not import it for others.
    tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor_type is not None and isinstance(value, tensor_type)


def _from_tensor(tensor: Any, field: str) -> npt.NDArray[Any]:
    torch = sys.modules["torch"]
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise SteeringError(
            field, f"has dtype {tensor.dtype}; use a real floating or integer dtype, e.g. torch.float32"
        )
    _check_shape(tuple(tensor.shape), field)
    if tensor.is_meta:
        raise SteeringError(
            field, "is a tensor on the meta device, which has no data; load it to the CPU or a GPU first"
        )
    if tensor.layout != torch.strided:
        raise SteeringError(field, f"has the layout {tensor.layout}; convert it with .to_dense()")
    try:
        array: npt.NDArray[Any] = tensor.detach().to("cpu", torch.float32).numpy()
    except (RuntimeError, TypeError) as error:  # sub-byte tensors
        raise SteeringError(field, f"cannot be copied to a float32 array: {shown(str(error))}") from None
    return array


def _from_packed(packed: Mapping[Any, object], field: str) -> npt.NDArray[Any]:
    dtype = read_packed_dtype(packed, field)
    shape = packed["shape"]
    if not isinstance(shape, (list, tuple)) or not all(map(is_integer, shape)):
        raise SteeringError(f"{field}.shape", f"must be a list of one integer, [H], not {shown(shape)}")
    _check_shape(tuple(shape), f"{field}.shape")
    return decode_packed(packed["data"], int(shape[0]), dtype, f"{field}.data")


def read_packed_dtype(packed: Mapping[Any, object], field: str) -> np.dtype[Any]:
    """Return the storage type of a packed array; raise SteeringError if its keys or its dtype are invalid."""
    if set(packed) != PACKED_KEYS:
        raise SteeringError(field, f"a packed array has the keys dtype, shape and data, not {shown(list(packed))}")
    name = read_choice(packed["dtype"], PACKED_DTYPES, f"{field}.dtype")
    return PACKED_DTYPES[name]


def decode_packed(data: object, count: int, dtype: np.dtype[Any], field: str) -> npt.NDArray[Any]:
    """Decode the ``data`` of a packed array.

    Args:
        data: The base64 string.
        count: Number of components.
        dtype: A value of `PACKED_DTYPES`.
        field: Path of the value, for errors.

    Returns:
        The components; bfloat16 becomes float32.
    """
    size = count * dtype.itemsize
    characters = (size + 2) // 3 * 4
    if not isinstance(data, str):
        raise SteeringError(field, f"must be a base64 string, not {type(data).__name__}")
    if len(data) != characters:  # checked before decoding, so that a wrong size costs nothing
        raise SteeringError(
            field, f"has {len(data)} characters; {size} bytes of this dtype and shape have {characters}"
        )
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SteeringError(field, f"is not valid base64 (RFC 4648, no line breaks): {error}") from None
    if len(raw) != size:
        raise SteeringError(field, f"decodes to {len(raw)} bytes; this dtype and shape need {size}")
    return from_bytes(raw, dtype)


def from_bytes(raw: bytes | bytearray, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return little-endian components of a type in `PACKED_DTYPES` as an array; bfloat16 becomes float32."""
    array: npt.NDArray[Any] = np.frombuffer(raw, dtype)
    if dtype is PACKED_DTYPES["bfloat16"]:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array
