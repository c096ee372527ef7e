# SPDX-License-Identifier: Apache-2.0
"""Containers of vector files, recognised by their first bytes: GGUF, safetensors, NumPy and JSON.

Files are untrusted: nothing is unpickled, and sizes are checked before tensors are read.
"""

from __future__ import annotations

import io
import math
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import safetensors

from vllm_steer.errors import SteeringError
from vllm_steer.extras import install_hint
from vllm_steer.limits import MAX_EDITS
from vllm_steer.request.scalars import shown
from vllm_steer.request.strict_json import parse_json
from vllm_steer.request.vector import PACKED_DTYPES, from_bytes

Kind = Literal["gguf", "safetensors", "npy", "npz", "json", "pickle", "unknown"]
MAX_FILE_BYTES = 2 << 30
_EXPANDED_BYTES, _EXPANSION = 64 << 20, 8
"""Bytes that any archive may have after decompression, or as a multiple of its size: numbers hardly compress."""
_MAX_GGUF_READS = 100_000
"""Numbers and texts of a header; 4096 tensors have 25,000."""
TORCH_HINT = (
    "convert it in Python: t = torch.load(FILE, weights_only=True); t = t if isinstance(t, dict) else {'vector': t}; "
    "safetensors.torch.save_file({str(k): v.contiguous() for k, v in t.items()}, OUT)"
)
"""Advice for a pickled file, which can have tensors for the layers, or one tensor."""
_DAMAGE = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError, RuntimeError),
    *(SyntaxError, tokenize.TokenError, zipfile.BadZipFile, zlib.error, safetensors.SafetensorError),
)
"""Errors of the libraries for damaged, encrypted or unknown files."""
DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "F32": PACKED_DTYPES["float32"],
        "F16": PACKED_DTYPES["float16"],
        "BF16": PACKED_DTYPES["bfloat16"],
        "F64": PACKED_DTYPES["float64"],
    }
)
"""Storage types by their names in safetensors and in GGUF."""


class Container(NamedTuple):
    """Content of a file."""

    kind: Kind
    content: Any
    """An array, or names with arrays; for JSON an object."""
    fields: Mapping[str, Any] = MappingProxyType({})
    """Fields of a GGUF file, each a pair of its type and its value."""


def kind_of(data: bytes) -> Kind:
    """Return the kind of a file by its first bytes."""
    if data[:4] == b"GGUF":
        return "gguf"
    if data[:6] == b"\x93NUMPY":
        return "npy"
    if data[:4] == b"PK\x03\x04":
        return "pickle" if b"data.pkl" in data[:256] else "npz"
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
                return Container("npy", _npy(data))
            case "npz":
                return _open_npz(data)
            case "safetensors":
                tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
                _check_count(tensors)
                arrays = {n: _array(n, t["dtype"], t["data"]).reshape(t["shape"]) for n, t in tensors}
                return Container("safetensors", arrays)
            case "json":
                return Container("json", parse_json(data, "file"))
            case "pickle":
                raise SteeringError("file", f"is pickled (.pt), and nothing is unpickled here; {TORCH_HINT}")
    except SteeringError:
        raise
    except _DAMAGE as error:
        raise SteeringError("file", f"is damaged: {' '.join(str(error).split())[:200] or 'truncated'}") from None
    kinds = "is not a safetensors file, GGUF, .npy, .npz or JSON"
    raise SteeringError("file", f"{kinds}; it begins with {shown(bytes(data[:8]))}")


def _check_count(items: Any) -> None:
    if len(items) > MAX_EDITS:
        raise SteeringError("file", f"has {len(items)} tensors; at most {MAX_EDITS} are read")


def _array(name: str, dtype: str, data: Any) -> np.ndarray:
    if dtype not in DTYPES:
        raise SteeringError(f"file.{shown(name)}", f"has dtype {shown(dtype)}; use one of {', '.join(DTYPES)}")
    return from_bytes(bytes(data), DTYPES[dtype])


def _npy(data: bytes) -> np.ndarray:
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, fortran, dtype = readers[version](file)  # type: ignore[no-untyped-call]
    if dtype.kind != "f" or dtype.itemsize > 8:
        raise SteeringError("file", f"has an array of {dtype}; use float32, float16 or float64")
    size, needed = len(data) - file.tell(), math.prod(shape) * dtype.itemsize
    if size != needed:
        raise SteeringError("file", f"has an array of {size} bytes; its shape {shown(shape)} has {needed}")
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")


def _open_npz(data: bytes) -> Container:
    # Before the library makes an object of each entry: the number of signatures that begin one.
    if (count := data.count(b"PK\x01\x02")) > 2 * MAX_EDITS:
        raise SteeringError("file", f"has {count} tensors; at most {MAX_EDITS} are read")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        _check_count(members)
        limit = min(MAX_FILE_BYTES, max(_EXPANDED_BYTES, _EXPANSION * len(data)))
        if (size := sum(member.file_size for member in members)) > limit:
            raise SteeringError("file", f"has {size} bytes after decompression; at most {limit} are read of this file")
        arrays = {member.filename.removesuffix(".npy"): _npy(archive.read(member)) for member in members}
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
        _check_count(reader.tensors)
        fields = {key: (field.types[0].name, field.contents()) for key, field in reader.fields.items() if field.types}
        arrays = {
            tensor.name: _array(tensor.name, tensor.tensor_type.name, tensor.data).reshape(tensor.shape[::-1].tolist())
            for tensor in reader.tensors
        }
    return Container("gguf", arrays, fields)
