# SPDX-License-Identifier: Apache-2.0
"""Containers of vector files, recognised by their first bytes: GGUF, safetensors, NumPy, torch and JSON.

Files are untrusted: nothing is unpickled, and counts, sizes and places are checked before tensors are read.
"""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence, Sized
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import safetensors

from vllm_steer.errors import SteeringError, install_hint
from vllm_steer.limits import MAX_EDITS
from vllm_steer.request.scalars import parse_json, shown, shown_name
from vllm_steer.request.vector import PACKED_DTYPES, from_bytes
from vllm_steer.vectors.archive import check_ranges, read_archive
from vllm_steer.vectors.torch_file import SAVE_HINT, read_tensors

Kind = Literal["gguf", "safetensors", "npy", "npz", "torch", "json", "pickle", "unknown"]
MAX_FILE_BYTES = 2 << 30
MAX_HEADER_BYTES = 4 << 20
"""Bytes of the header of a safetensors file."""
MAX_TENSORS = 2 * MAX_EDITS
"""Tensors of a file: a module has `MAX_EDITS` vectors and further tensors for its probes."""
_OTHER_MEMBERS = 8
"""Members of a file of torch that are not numbers."""
_EXPANDED_BYTES, _EXPANSION = 64 << 20, 8
"""Bytes that any archive may have after decompression, or as a multiple of its size: numbers hardly compress."""
_FIRST_NAME = 1024
"""Bytes at the beginning of an archive that have the name of its first member, of a file system's longest at most."""
_MAX_GGUF_READS = 30_000
"""Numbers and texts of a header; 4096 tensors have 25,000."""
DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "F32": PACKED_DTYPES["float32"],
        "F16": PACKED_DTYPES["float16"],
        "BF16": PACKED_DTYPES["bfloat16"],
        "F64": PACKED_DTYPES["float64"],
    }
)
"""Storage types by their names in safetensors and in GGUF."""


_TENSOR_KEYS = frozenset({"dtype", "shape", "data_offsets"})
"""Keys of a tensor in the header of a safetensors file; the library ignores all others."""
_NPY_HEADERS: Mapping[tuple[int, int], Callable[[Any], tuple[tuple[int, ...], bool, np.dtype[Any]]]] = MappingProxyType(
    {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
)
_NPY_KEYS = 3


class Container(NamedTuple):
    """Content of a file."""

    kind: Kind
    content: Any
    """An array, or names with arrays of one or two dimensions; for JSON an object."""
    fields: Mapping[str, Any] = MappingProxyType({})
    """Fields of a GGUF file, each a pair of its type and its value; metadata of a safetensors file."""


def kind_of(data: bytes) -> Kind:
    """Return the kind of a file by its first bytes."""
    if data[:4] == b"GGUF":
        return "gguf"
    if data[:6] == b"\x93NUMPY":
        return "npy"
    if data[:4] == b"PK\x03\x04":
        return "torch" if b"/data.pkl" in data[:_FIRST_NAME] else "npz"
    if data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= len(data) - 8:
        return "safetensors"
    if data[:64].lstrip()[:1] == b"{":
        return "json"
    return "pickle" if data[:1] == b"\x80" else "unknown"


def open_container(data: bytes) -> Container:
    """Return the content of a file.

    Raises:
        SteeringError: The file is damaged, too large or of another kind.
    """
    if len(data) > MAX_FILE_BYTES:
        raise SteeringError("file", f"has {len(data)} bytes; at most {MAX_FILE_BYTES} are read")
    try:
        match kind_of(data):
            case "gguf":
                return _open_gguf(data)
            case "npy":
                return Container("npy", _npy("vector", data))
            case "npz":
                return _open_npz(data)
            case "torch":
                return _open_torch(data)
            case "safetensors":
                return open_safetensors(data)
            case "json":
                return Container("json", parse_json(data, "file"))
            case "pickle":
                raise SteeringError("file", f"is a pickle, and nothing is unpickled; {SAVE_HINT}")
    except SteeringError:
        raise
    except Exception as error:  # numpy, gguf and zlib raise errors of any class for damaged files
        raise SteeringError("file", f"is damaged: {' '.join(str(error).split())[:200] or 'truncated'}") from None
    if data[:64].lstrip()[:1] == b"[":
        form = '{"hookName": "blocks.10.hook_resid_post", "values": [...]}'
        raise SteeringError("file", f"is a JSON list without a place; write {form}, or save the list as .npy")
    kinds = "is not a safetensors file, GGUF, .pt, .npy, .npz or JSON"
    raise SteeringError("file", f"{kinds}; it begins with {shown(bytes(data[:8]))}")


def open_safetensors(data: bytes) -> Container:
    """Return the tensors and the metadata of a safetensors file; raise SteeringError if it is damaged."""
    header = _read_header(data)
    metadata = header.pop("__metadata__", {})
    try:
        tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise SteeringError("file", f"is not a valid safetensors file: {error}") from None
    arrays = {name: _array(name, entry["dtype"], entry["data"], entry["shape"]) for name, entry in tensors}
    return Container("safetensors", arrays, metadata)


def _read_header(data: bytes) -> dict[str, Any]:
    """Return the header of a safetensors file; raise SteeringError for one that is damaged or has too many tensors."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise SteeringError("file", "is not a safetensors file: it is shorter than its header states")
    if size > MAX_HEADER_BYTES:
        raise SteeringError("file", f"has a header of {size} bytes; at most {MAX_HEADER_BYTES} are allowed")
    header = parse_json(data[8 : 8 + size], "file")
    if not isinstance(header, dict):
        raise SteeringError("file", "is not a safetensors file: its header is not an object")
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise SteeringError("file", "has metadata that are not strings")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    _check_count(tensors)
    for name, entry in tensors.items():
        if not isinstance(entry, dict) or entry.keys() != _TENSOR_KEYS:
            raise SteeringError(shown_name(name), f"must have exactly the keys {', '.join(sorted(_TENSOR_KEYS))}")
        dtype = entry["dtype"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise SteeringError(shown_name(name), f"has dtype {shown(dtype)}; use one of {', '.join(DTYPES)}")
    return header


def _check_count(items: Sized) -> None:
    if len(items) > MAX_TENSORS:
        raise SteeringError("file", f"has {len(items)} tensors; at most {MAX_TENSORS} are read")


def _array(name: str, dtype: str, data: bytes, shape: Sequence[int]) -> np.ndarray:
    if dtype not in DTYPES:
        raise SteeringError(shown_name(name), f"has dtype {shown(dtype)}; use one of {', '.join(DTYPES)}")
    return _shaped(name, from_bytes(data, DTYPES[dtype]), shape)


def _shaped(name: str, array: np.ndarray, shape: Sequence[int], order: Literal["C", "F"] = "C") -> np.ndarray:
    # Numpy refuses very many dimensions, and very large ones of an empty array.
    if len(shape) not in (1, 2) or max(shape) > len(array):
        problem = "a vector is [H], vectors of layers are [layers, H]"
        raise SteeringError(shown_name(name), f"has shape {shown(list(shape))}; {problem}")
    return array.reshape(shape, order=order)


def _npy(name: str, data: bytes) -> np.ndarray:
    file = io.BytesIO(data)
    shape, fortran, dtype = _NPY_HEADERS[np.lib.format.read_magic(file)](file)  # type: ignore[no-untyped-call]
    if data[: file.tell()].count(b":") != _NPY_KEYS:  # numpy takes the last one of equal keys
        raise SteeringError("file", "has a header with a repeated key")
    if dtype.kind != "f" or dtype.itemsize > 8:
        raise SteeringError("file", f"has an array of {dtype}; use float32, float16 or float64")
    size, needed = len(data) - file.tell(), math.prod(shape) * dtype.itemsize
    if size != needed:
        raise SteeringError("file", f"has an array of {size} bytes; its shape {shown(shape)} has {needed}")
    return _shaped(name, np.frombuffer(data, dtype, offset=file.tell()), shape, "F" if fortran else "C")


def _members(data: bytes) -> dict[str, bytes]:
    limit = min(MAX_FILE_BYTES, max(_EXPANDED_BYTES, _EXPANSION * len(data)))
    return read_archive(data, MAX_TENSORS + _OTHER_MEMBERS, limit)


def _open_torch(data: bytes) -> Container:
    content = read_tensors(_members(data), MAX_TENSORS)
    tensors = content if isinstance(content, dict) else {"vector": content}
    shaped = {name: _shaped(name, tensor.reshape(-1), tensor.shape) for name, tensor in tensors.items()}
    return Container("torch", shaped if isinstance(content, dict) else shaped["vector"])


def _open_npz(data: bytes) -> Container:
    arrays: dict[str, np.ndarray] = {}
    for member, content in _members(data).items():
        name = member.removesuffix(".npy")
        if name in arrays:
            raise SteeringError("file", f"has two arrays with the name {shown(name)}; remove one of them")
        arrays[name] = _npy(name, content)
    return Container("npz", arrays)


def _open_gguf(data: bytes) -> Container:
    try:
        import gguf
    except ImportError:
        raise SteeringError("file", f"is a GGUF file, which needs the package gguf; {install_hint('gguf')}") from None

    class BoundedReader(gguf.GGUFReader):
        """The library's reader, which would read lists of any stated length beyond the end of the file."""

        num_reads = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            self.num_reads += 1
            found = super()._get(offset, dtype, count, override_order)
            if len(found) < count or self.num_reads > _MAX_GGUF_READS:
                raise ValueError("the header is cut off or has too many fields")
            return found

    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        reader = BoundedReader(file)  # type: ignore[arg-type]  # numpy.memmap, which it calls, takes files
        if reader.byte_order != "I":
            raise SteeringError("file", "has big-endian numbers; convert it with gguf-convert-endian FILE little")
        fields = {key: (field.types[0].name, field.contents()) for key, field in reader.fields.items() if field.types}
        if (kind := fields.get("general.architecture", ("", None))[1]) != "controlvector":
            raise SteeringError("file", f"is a GGUF file of {shown(kind)}; only controlvector is read")
        _check_count(reader.tensors)
        ranges = ((tensor.data_offset, tensor.data_offset + tensor.n_bytes) for tensor in reader.tensors)
        check_ranges(ranges, reader.data_offset, len(data))
        arrays = {
            tensor.name: _array(
                tensor.name, tensor.tensor_type.name, tensor.data.tobytes(), tensor.shape[::-1].tolist()
            )
            for tensor in reader.tensors
        }
    return Container("gguf", arrays, fields)
