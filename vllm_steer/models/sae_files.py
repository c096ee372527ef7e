# SPDX-License-Identifier: Apache-2.0
"""Files of sparse autoencoders: their headers, and tensors of all features or of one.

Files are untrusted: nothing is unpickled, and sizes are checked before tensors are read.
"""

from __future__ import annotations

import json
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_SAE_FEATURES, MAX_WIDTH
from vllm_steer.taps.sparse_encoder import FloatArray

_FORMATS: Mapping[str, tuple[str, str]] = {
    "saelens": ("sae_weights.safetensors", "cfg.json"),
    "sparsify": ("sae.safetensors", "cfg.json"),
    "gemma-scope-2": ("params.safetensors", "config.json"),
    "gemma-scope": ("params.npz", ""),
}
"""Files of weights and of the configuration by format."""
_MAX_CONFIG_BYTES = 1 << 20
_HEADERS: Mapping[tuple[int, int], Callable[[Any], tuple[tuple[int, ...], bool, np.dtype[Any]]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
"""Readers of the headers of arrays by the version of their format."""
_ARCHIVE_ERRORS = (
    *(OSError, EOFError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error),
    *(tokenize.TokenError, SyntaxError, TypeError),  # of numpy's parser of headers
)
"""Errors of damaged, encrypted or unknown archives, of their compression and of their arrays."""
DECODERS = ("W_dec", "w_dec")
DECODER_FACTORS = ("finetuning_scaling_factor", "scaling_factor")
"""Factors of the activations ahead of the decoder that SAELens finetunes, by their present and their older name."""
_FEATURE_AXES: Mapping[str, int] = {
    **dict.fromkeys(("W_enc", "w_enc"), 1),
    **dict.fromkeys(
        (*DECODERS, *DECODER_FACTORS, "encoder.weight", "encoder.bias",
         "b_enc", "threshold", "b_gate", "r_mag", "b_mag"),
        0,
    ),
}  # fmt: skip
"""Axis of the features of each tensor that has one."""
_MATRICES = (*DECODERS, "encoder.weight")
"""Tensors with the features on axis 0 that are not vectors."""
_SAFETENSORS_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class SaeFiles:
    """Weights and configuration of an autoencoder."""

    field: str
    form: str
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], FloatArray]
    """Returns a tensor, of one feature only if the files were opened for one."""

    def refuse(self, problem: str) -> SteeringError:
        """Return the error for a problem with these files."""
        return SteeringError(self.field, f"{problem} ({self.form})")

    def matrix(self, name: str, *, transposed: bool = False) -> FloatArray:
        """Return the weights ``[hidden, features]``."""
        found = self.read(name)
        return np.ascontiguousarray(found.T) if transposed else found

    @property
    def described(self) -> list[Mapping[str, Any]]:
        """The configuration, and SAELens's metadata in it."""
        return [each for each in (self.config, self.config.get("metadata")) if isinstance(each, dict)]

    @property
    def weights(self) -> tuple[str, bool]:
        """Name of the encoder's weights, and whether they are ``[features, hidden]``."""
        if self.form == "sparsify":
            return "encoder.weight", True
        return next((name for name in ("W_enc", "w_enc") if name in self.shapes), "W_enc"), False

    @property
    def shape(self) -> tuple[int, int]:
        """Hidden size and number of features; raises SteeringError if the weights do not have them."""
        name, transposed = self.weights
        shape = self.shapes.get(name, ())
        if len(shape) != 2:
            raise self.refuse(f"{name} is missing or is not a matrix")
        hidden, features = shape[::-1] if transposed else shape
        if not (0 < hidden <= MAX_WIDTH and 0 < features <= MAX_SAE_FEATURES):
            raise self.refuse(f"has {features} features of width {hidden}; at most {MAX_SAE_FEATURES} of {MAX_WIDTH}")
        return hidden, features

    def vector(self, name: str, length: int) -> FloatArray:
        """Return a tensor of ``length`` numbers; one number is repeated."""
        # The whole file counts, also if it was opened for one feature.
        count, expected = math.prod(self.shapes.get(name, ())), self.shape[1] if name in _FEATURE_AXES else length
        if name in self.shapes and count not in (1, expected):
            raise self.refuse(f"{name} has {count} numbers, expected {expected}")
        found = self.read(name).reshape(-1)
        if len(found) == 1:
            found = np.full(length, found[0], dtype=np.float32)
        return found


def open_files(folder: str, field: str, feature: int | None = None) -> SaeFiles:
    root = Path(folder)
    for form, (weights, config) in _FORMATS.items():
        if (root / weights).is_file() and (not config or (root / config).is_file()):
            settings = _read_config(root / config, field) if config else {}
            opener = _open_npz if weights.endswith(".npz") else _open_safetensors
            return opener(root / weights, field, form, settings, feature)
    expected = "; ".join(" and ".join(filter(None, files)) for files in _FORMATS.values())
    raise SteeringError(field, f"{folder} has no autoencoder; expected {expected}")


def _read_config(path: Path, field: str) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise SteeringError(field, f"{path} is larger than {_MAX_CONFIG_BYTES} bytes")
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SteeringError(field, f"{path} cannot be read: {str(error)[:200]}") from None
    if not isinstance(config, dict):
        raise SteeringError(field, f"{path} must contain a JSON object")
    return config


def _part(name: str, shape: tuple[int, ...], feature: int | None) -> tuple[slice, ...]:
    """Return the index of a feature's part of a tensor; a single number belongs to all features."""
    axis = _FEATURE_AXES.get(name)
    if axis == 0 and name not in _MATRICES:
        # A vector can be stored as a matrix with one row.
        axis = next((each for each, size in enumerate(shape) if size != 1), 0)
    if feature is None or axis is None or axis >= len(shape) or shape[axis] == 1:
        return (slice(None),) * len(shape)
    return (*(slice(None),) * axis, slice(feature, feature + 1), *(slice(None),) * (len(shape) - axis - 1))


def _open_safetensors(path: Path, field: str, form: str, config: Mapping[str, Any], feature: int | None) -> SaeFiles:
    def opened() -> Any:
        return safetensors.safe_open(str(path), framework="pt")

    def read(name: str) -> FloatArray:
        try:
            with opened() as file:
                if (dtype := file.get_slice(name).get_dtype()) not in _SAFETENSORS_DTYPES:
                    # Others, such as quantised weights, need a scale, which no format has.
                    problem = f"must have the dtype {', '.join(_SAFETENSORS_DTYPES)}, not {dtype}"
                    raise SteeringError(field, f"{name} of {path} {problem}")
                part = _part(name, shapes.get(name, ()), feature)
                # A scalar has no slices.
                tensor = file.get_slice(name)[part] if part else file.get_tensor(name)
                array: FloatArray = tensor.float().numpy()
        except (safetensors.SafetensorError, OSError) as error:
            raise SteeringError(field, f"{name} of {path} cannot be read: {str(error)[:200]}") from None
        return array

    try:
        with opened() as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise SteeringError(field, f"{path} cannot be read: {str(error)[:200]}") from None
    return SaeFiles(field, form, config, shapes, read)


def _open_npz(path: Path, field: str, form: str, config: Mapping[str, Any], feature: int | None) -> SaeFiles:
    """Open an archive of arrays. Shapes come from the headers, so that a compressed archive cannot fill the memory."""
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                member = entry.filename
                # The library decompresses blocks of other methods whole, and takes the last member of a name.
                if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise SteeringError(field, f"{member} of {path} has a compression other than deflate")
                if member.removesuffix(".npy") in shapes:
                    raise SteeringError(field, f"{path} has two arrays with the name {member}")
                with archive.open(entry) as file:
                    version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
                    shape, _, dtype = _HEADERS[version](file)
                    needed = file.tell() + math.prod(shape) * dtype.itemsize
                if dtype.kind != "f":
                    raise SteeringError(field, f"{member} of {path} must contain floating-point numbers, not {dtype}")
                if (size := entry.file_size) != needed:
                    raise SteeringError(field, f"{member} of {path} has {size} bytes; its shape {shape} has {needed}")
                shapes[member.removesuffix(".npy")] = shape
    except SteeringError:
        raise
    except _ARCHIVE_ERRORS as error:
        raise SteeringError(field, f"{path} cannot be read: {str(error)[:200]}") from None

    def read(name: str) -> FloatArray:
        if name not in shapes:
            raise SteeringError(field, f"{path} has no array {name}")
        part = _part(name, shapes[name], feature)
        try:
            with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
                member = archive.getinfo(f"{name}.npy")
                if feature is not None and member.compress_type == zipfile.ZIP_STORED:
                    return _mapped(path, member, file)[part].astype(np.float32)
                # Without pickled objects, which is the default.
                whole = np.asarray(np.lib.format.read_array(file), dtype=np.float32)  # type: ignore[no-untyped-call]
                return whole[part]
        except _ARCHIVE_ERRORS as error:
            raise SteeringError(field, f"{name} of {path} cannot be read: {str(error)[:200]}") from None

    return SaeFiles(field, form, config, shapes, read)


def _mapped(path: Path, member: zipfile.ZipInfo, file: Any) -> npt.NDArray[Any]:
    """Return an array that an archive holds without compression, mapped into memory."""
    shape, fortran, dtype = _HEADERS[np.lib.format.read_magic(file)](file)  # type: ignore[no-untyped-call]
    with path.open("rb") as raw:
        raw.seek(member.header_offset + 26)
        lengths = struct.unpack("<HH", raw.read(4))
    # The member begins behind its local header, a name and extra data of these lengths.
    offset = member.header_offset + 30 + sum(lengths) + file.tell()
    return np.memmap(path, dtype, "r", offset, shape, "F" if fortran else "C")
