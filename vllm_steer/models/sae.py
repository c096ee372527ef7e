# SPDX-License-Identifier: Apache-2.0
"""Encoders of sparse autoencoders (SAEs) from local folders.

=====================  ==============================================  =========================================
format                 files                                           encoder
=====================  ==============================================  =========================================
SAELens                ``cfg.json``, ``sae_weights.safetensors``       ReLU, TopK, BatchTopK and JumpReLU, gated
Gemma Scope            ``params.npz``                                  JumpReLU on the row itself
Gemma Scope 2          ``config.json``, ``params.safetensors``         JumpReLU on the row itself
sparsify               ``cfg.json``, ``sae.safetensors``               TopK of ReLU, minus ``b_dec``
=====================  ==============================================  =========================================

Files are untrusted: nothing is unpickled, and sizes are checked before tensors are read. Variants whose encoder differs
from these, such as inputs with a learned scale, are refused, and so are transcoders, whose decoders write another site
than the encoder reads. ``params.npz`` has no configuration: lower-case keys (``w_enc``, ``w_dec``) mark a transcoder.
"""

from __future__ import annotations

import json
import struct
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
from vllm_steer.models.centring import Centring, subtracts_means, without_row_means
from vllm_steer.spec.scalars import is_integer, shown
from vllm_steer.taps.sparse_encoder import FloatArray, SparseEncoder

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
_HOOK_KEYS, _HEAD_KEYS = ("hook_name", "hook_point"), ("hook_head_index", "hook_point_head_index")
"""Settings of SAELens for the place of an autoencoder, by their present and their older names."""
_ARCHIVE_ERRORS = (OSError, EOFError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""Errors of damaged, encrypted or unknown archives, of their compression and of their arrays."""
_DECODERS = ("W_dec", "w_dec")
_SKIPS = ("W_skip", "affine_skip_connection")
"""Weights of transcoders with a skip connection."""
_DECODER_FACTORS = ("finetuning_scaling_factor", "scaling_factor")
"""Factors of the activations ahead of the decoder that SAELens finetunes, by their present and their older name."""
_FEATURE_AXES: Mapping[str, int] = {
    **dict.fromkeys(("W_enc", "w_enc"), 1),
    **dict.fromkeys(
        (*_DECODERS, *_DECODER_FACTORS, "encoder.weight", "encoder.bias",
         "b_enc", "threshold", "b_gate", "r_mag", "b_mag"),
        0,
    ),
}  # fmt: skip
"""Axis of the features of each tensor that has one."""


@dataclass(frozen=True)
class _Files:
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

    def vector(self, name: str, length: int) -> FloatArray:
        """Return a tensor of ``length`` numbers; one number stands for equal ones."""
        found = self.read(name).reshape(-1)
        if len(found) == 1:
            found = np.full(length, found[0], dtype=np.float32)
        if len(found) != length:
            raise self.refuse(f"{name} has {len(found)} numbers, expected {length}")
        return found


def encoder_shape(folder: str, field: str, hidden_size: int | None = None) -> tuple[int, int]:
    """Return hidden size and number of features of an autoencoder, from the headers of its files.

    Args:
        folder: Folder of the autoencoder.
        field: Path of the setting, for errors.
        hidden_size: The model's hidden size; None for any.

    Raises:
        SteeringError: The folder has no autoencoder of a known format, or it has another width.
    """
    hidden, features = _shape_of(_open(folder, field))
    if hidden_size not in (None, hidden):
        raise SteeringError(field, f"has width {hidden}, but this model's hidden size is {hidden_size}")
    return hidden, features


def check_encoder(folder: str, field: str, hidden_size: int, centring: Centring) -> tuple[int, int]:
    """Return :func:`encoder_shape`, or raise SteeringError if an engine would refuse the autoencoder.

    Of the weights, only one feature is read.
    """
    shape = encoder_shape(folder, field, hidden_size)
    _encoder_of(_open(folder, field, 0), hidden_size, 1, centring)
    return shape


def _shape_of(files: _Files) -> tuple[int, int]:
    name, transposed = _weights_of(files)
    shape = files.shapes.get(name, ())
    if len(shape) != 2:
        raise files.refuse(f"{name} is missing or is not a matrix")
    hidden, features = shape[::-1] if transposed else shape
    if not (0 < hidden <= MAX_WIDTH and 0 < features <= MAX_SAE_FEATURES):
        raise files.refuse(f"has {features} features of width {hidden}; at most {MAX_SAE_FEATURES} of {MAX_WIDTH}")
    return hidden, features


def encoder_bytes(shape: tuple[int, int]) -> int:
    """Return the size of an encoder on the device: its weights and up to four vectors, float32."""
    hidden, features = shape
    return 4 * (hidden * features + 4 * features + hidden)


def read_encoder(folder: str, field: str, centring: Centring = "unknown") -> SparseEncoder:
    """Return the encoder of the autoencoder in a folder.

    Args:
        folder: Folder of the autoencoder.
        field: Path of the setting, for errors.
        centring: How the setting ``center_writing_weights`` changes rows of the engine's model.

    Raises:
        SteeringError: A file is damaged, or the autoencoder is of a kind that is not supported.
    """
    files = _open(folder, field)
    return _encoder_of(files, *_shape_of(files), centring)


def read_feature(
    folder: str, index: int, field: str, centring: Centring = "unknown"
) -> tuple[SparseEncoder, FloatArray]:
    """Return the encoder of one feature, with one column, and the feature's decoder direction ``[hidden]``.

    Only the feature's part of the files is read, except from compressed archives.

    Args:
        folder: Folder of the autoencoder.
        index: Number of the feature.
        field: Path of the setting, for errors.
        centring: How the setting ``center_writing_weights`` changes rows of the engine's model.

    Raises:
        SteeringError: There is no such feature, a file is damaged, or the decoder is missing.
    """
    hidden, features = encoder_shape(folder, field)
    if not 0 <= index < features:
        raise SteeringError(field, f"feature {index} does not exist; the autoencoder has features 0 to {features - 1}")
    files = _open(folder, field, index)
    name = next((name for name in _DECODERS if name in files.shapes), None)
    if name is None or files.shapes[name] != (features, hidden):
        raise files.refuse(f"has no decoder of shape {[features, hidden]}")
    decoder = files.read(name)[0]
    if _is_rescaled(files):
        decoder = decoder / np.linalg.norm(decoder)
    decoder = decoder * _decoder_factor(files)
    if not np.isfinite(decoder).all():
        raise files.refuse("contains numbers that are not finite")
    return _encoder_of(files, hidden, 1, centring), decoder


def _encoder_of(files: _Files, hidden: int, features: int, centring: Centring) -> SparseEncoder:
    _refuse_transcoder(files, hidden)
    made = {
        "saelens": _read_saelens,
        "sparsify": _read_sparsify,
        "gemma-scope": _read_gemma_scope,
        "gemma-scope-2": _read_gemma_scope,
    }[files.form](files, hidden, features)
    if files.form == "saelens" and subtracts_means(files.config, centring, files.refuse):
        made = without_row_means(made)
    arrays = (made.weights, made.bias, made.subtracted, made.threshold, made.scale, made.magnitude_bias)
    if not all(np.isfinite(each).all() for each in arrays if each is not None):
        raise files.refuse("contains numbers that are not finite")
    return made


def _open(folder: str, field: str, feature: int | None = None) -> _Files:
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
    """Return the index of a feature's part of a tensor; one number stands for all features."""
    axis = _FEATURE_AXES.get(name)
    if feature is None or axis is None or axis >= len(shape) or shape[axis] == 1:
        return (slice(None),) * len(shape)
    return (*(slice(None),) * axis, slice(feature, feature + 1), *(slice(None),) * (len(shape) - axis - 1))


def _open_safetensors(path: Path, field: str, form: str, config: Mapping[str, Any], feature: int | None) -> _Files:
    def opened() -> Any:
        return safetensors.safe_open(str(path), framework="pt")

    def read(name: str) -> FloatArray:
        try:
            with opened() as file:
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
    return _Files(field, form, config, shapes, read)


def _open_npz(path: Path, field: str, form: str, config: Mapping[str, Any], feature: int | None) -> _Files:
    """Open an archive of arrays. Shapes come from the headers, so that a compressed archive cannot fill the memory."""
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                with archive.open(member) as file:
                    version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
                    shape, _, dtype = _HEADERS[version](file)
                if dtype.kind != "f":
                    raise SteeringError(field, f"{member} of {path} must contain floating-point numbers, not {dtype}")
                size, most = archive.getinfo(member).file_size, int(np.prod(shape)) * dtype.itemsize + 4096
                if size > most:
                    raise SteeringError(field, f"{member} of {path} is larger than its shape {shape}")
                shapes[member.removesuffix(".npy")] = shape
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

    return _Files(field, form, config, shapes, read)


def _mapped(path: Path, member: zipfile.ZipInfo, file: Any) -> npt.NDArray[Any]:
    """Return an array that an archive holds without compression, mapped into memory."""
    shape, fortran, dtype = _HEADERS[np.lib.format.read_magic(file)](file)  # type: ignore[no-untyped-call]
    with path.open("rb") as raw:
        raw.seek(member.header_offset + 26)
        lengths = struct.unpack("<HH", raw.read(4))
    # The member begins behind its local header, a name and extra data of these lengths.
    offset = member.header_offset + 30 + sum(lengths) + file.tell()
    return np.memmap(path, dtype, "r", offset, shape, "F" if fortran else "C")


def _weights_of(files: _Files) -> tuple[str, bool]:
    """Return the name of the encoder's weights, and whether they are ``[features, hidden]``."""
    if files.form == "sparsify":
        return "encoder.weight", True
    return next((name for name in ("W_enc", "w_enc") if name in files.shapes), "W_enc"), False


def _refuse_transcoder(files: _Files, hidden: int) -> None:
    """Raise SteeringError if the decoder writes another site than the encoder reads."""
    config, shapes = files.config, files.shapes
    sites: list[tuple[object, object]] = []
    if files.form == "gemma-scope-2":
        sites.append((config.get("hf_hook_point_in"), config.get("hf_hook_point_out")))
        if not any(sites[0]):
            raise files.refuse("config.json must contain equal hf_hook_point_in and hf_hook_point_out")
    elif files.form == "saelens":
        described = [each for each in (config, config.get("metadata")) if isinstance(each, dict)]
        read = next((each["hook_name"] for each in described if each.get("hook_name")), None)
        sites += [(read, each["hook_name_out"]) for each in described if each.get("hook_name_out")]
    if (
        any(first != second for first, second in sites)
        or config.get("affine_connection")
        or any(name in shapes for name in _SKIPS)
        or any(name in shapes and shapes[name][-1:] != (hidden,) for name in _DECODERS)
        or (files.form == "gemma-scope" and "w_enc" in shapes)
    ):
        raise files.refuse("transcoders are not supported; use an autoencoder of one site")


def _is_rescaled(files: _Files) -> bool:
    """Return whether activations are multiplied by the norms of the decoder's rows, which then count as normalized."""
    return files.form == "saelens" and bool(files.config.get("rescale_acts_by_decoder_norm"))


def _decoder_factor(files: _Files) -> np.float32:
    """Return the factor of a feature's activation ahead of the decoder; raise SteeringError if it is not clear."""
    name = next((name for name in _DECODER_FACTORS if name in files.shapes), None)
    factor = np.float32(1.0) if name is None else files.vector(name, 1)[0]
    # For a time, SAELens saved factors of one with every autoencoder.
    if bool(files.config.get(_DECODER_FACTORS[0])) != (name is not None) and (name is None or factor != 1.0):
        there = "has no such tensor" if name is None else f"has the tensor {name}, which is not used"
        raise files.refuse(f"finetuning_scaling_factor of the configuration disagrees with the weights: it {there}")
    return np.float32(factor)


def _read_gemma_scope(files: _Files, hidden: int, features: int) -> SparseEncoder:
    architecture = files.config.get("architecture", "jump_relu")
    if architecture != "jump_relu":
        raise files.refuse(f"architecture {shown(architecture)} is not supported; use jump_relu")
    return SparseEncoder(
        "jumprelu",
        files.matrix(_weights_of(files)[0]),
        files.vector("b_enc", features),
        threshold=files.vector("threshold", features),
    )


def _read_sparsify(files: _Files, hidden: int, features: int) -> SparseEncoder:
    config = files.config
    for name in ("transcode", "skip_connection", "signed"):
        if config.get(name):
            raise files.refuse(f"{name} is not supported; use an autoencoder of one site")
    activation = config.get("activation", "topk")
    if activation != "topk":
        raise files.refuse(f"activation {shown(activation)} is not supported; use topk")
    return SparseEncoder(
        "topk",
        files.matrix("encoder.weight", transposed=True),
        files.vector("encoder.bias", features),
        subtracted=files.vector("b_dec", hidden),
        k=_read_k(files, config.get("k")),
    )


def _read_saelens(files: _Files, hidden: int, features: int) -> SparseEncoder:
    config = files.config
    metadata = config.get("metadata")
    normalization = config.get("normalize_activations", "none")
    if normalization not in ("none", False, None):
        raise files.refuse(f"normalize_activations {shown(normalization)} is not supported; fold it into the weights")
    described = [each for each in (config, metadata) if isinstance(each, dict)]
    hooks = [str(each[key]) for each in described for key in _HOOK_KEYS if each.get(key)]
    # Old files of SAELens do not have the setting, which follows from the hook.
    reshaped = "hook_z" if any("hook_z" in hook for hook in hooks) else "none"
    if config.get("reshape_activations", reshaped) not in ("none", None):
        raise files.refuse("reshape_activations is not supported: such rows (hook_z) are not rows of the stream")
    if any(each.get(key) is not None for each in described for key in _HEAD_KEYS):
        raise files.refuse("autoencoders of one attention head are not supported")
    architecture = config.get("architecture", "standard")
    function = config.get("activation_fn", config.get("activation_fn_str", "relu"))
    if architecture == "topk" or (architecture == "standard" and function == "topk"):
        # Files of SAELens before version 6 have `k` here.
        given = config.get("activation_fn_kwargs")
        architecture, config = "topk", {**config, **(given if isinstance(given, dict) else {})}
    elif architecture == "standard" and function != "relu":
        raise files.refuse(f"activation_fn {shown(function)} is not supported; use relu or topk")
    rescaled = _is_rescaled(files)
    if rescaled and architecture not in ("topk", "batchtopk"):
        raise files.refuse(
            f"rescale_acts_by_decoder_norm is not supported with architecture {shown(architecture)}; fold the norms "
            "into the weights"
        )
    if "threshold" in files.shapes and architecture == "batchtopk":
        # BatchTopK is trained with a batch's largest activations, and served with a threshold of such activations.
        architecture = "jumprelu"
    weights = files.matrix("W_enc")
    subtracted = files.vector("b_dec", hidden) if config.get("apply_b_dec_to_input", True) else None
    if architecture == "gated":
        return SparseEncoder(
            "gated",
            weights,
            files.vector("b_gate", features),
            subtracted,
            scale=np.exp(files.vector("r_mag", features)),
            magnitude_bias=files.vector("b_mag", features),
        )
    bias = files.vector("b_enc", features)
    if rescaled:
        norms = np.linalg.norm(files.matrix("W_dec"), axis=-1).astype(np.float32)
        if norms.shape != (features,):
            raise files.refuse("W_dec does not have a row for each feature")
        weights, bias = weights * norms, bias * norms
    if architecture == "standard":
        return SparseEncoder("relu", weights, bias, subtracted)
    if architecture == "jumprelu":
        return SparseEncoder("jumprelu", weights, bias, subtracted, threshold=files.vector("threshold", features))
    if architecture != "topk":
        raise files.refuse(
            f"architecture {shown(architecture)} is not supported; use standard, topk, jumprelu or gated, or a "
            "batchtopk with a threshold"
        )
    return SparseEncoder("topk", weights, bias, subtracted, k=_read_k(files, config.get("k")))


def _read_k(files: _Files, value: object) -> int:
    _, features = _shape_of(files)
    if not is_integer(value) or not 1 <= value <= features:
        raise files.refuse(f"k must be 1 to {features}, not {shown(value)}")
    return int(value)
