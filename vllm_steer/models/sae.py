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

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.models.centring import Centring, subtracts_means, without_row_means
from vllm_steer.models.sae_files import DECODER_FACTORS, DECODERS, SaeFiles, open_files
from vllm_steer.request.scalars import is_integer, shown
from vllm_steer.taps.sparse_encoder import FloatArray, SparseEncoder

_HOOK_KEYS, _HEAD_KEYS = ("hook_name", "hook_point"), ("hook_head_index", "hook_point_head_index")
"""Settings of SAELens for the place of an autoencoder, by their present and their older names."""
_SKIPS = ("W_skip", "affine_skip_connection")
"""Weights of transcoders with a skip connection."""


def encoder_shape(folder: str, field: str, hidden_size: int | None = None) -> tuple[int, int]:
    """Return hidden size and number of features of an autoencoder, from the headers of its files.

    Args:
        folder: Folder of the autoencoder.
        field: Path of the setting, for errors.
        hidden_size: The model's hidden size; None for any.

    Raises:
        SteeringError: The folder has no autoencoder of a known format, or it has another width.
    """
    hidden, features = open_files(folder, field).shape
    if hidden_size not in (None, hidden):
        raise SteeringError(field, f"has width {hidden}, but this model's hidden size is {hidden_size}")
    return hidden, features


def check_encoder(folder: str, field: str, hidden_size: int, centring: Centring) -> tuple[int, int]:
    """Return :func:`encoder_shape`, or raise SteeringError if an engine would refuse the autoencoder.

    Of the weights, only one feature is read.
    """
    shape = encoder_shape(folder, field, hidden_size)
    _encoder_of(open_files(folder, field, 0), hidden_size, 1, centring)
    return shape


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
    files = open_files(folder, field)
    return _encoder_of(files, *files.shape, centring)


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
    files = open_files(folder, field, index)
    name = next((name for name in DECODERS if name in files.shapes), None)
    if name is None or files.shapes[name] != (features, hidden):
        raise files.refuse(f"has no decoder of shape {[features, hidden]}")
    decoder = files.read(name)[0]
    if _is_rescaled(files):
        decoder = decoder / np.linalg.norm(decoder)
    decoder = decoder * _decoder_factor(files)
    if not np.isfinite(decoder).all():
        raise files.refuse("contains numbers that are not finite")
    return _encoder_of(files, hidden, 1, centring), decoder


def _encoder_of(files: SaeFiles, hidden: int, features: int, centring: Centring) -> SparseEncoder:
    _refuse_transcoder(files, hidden)
    made = {
        "saelens": _read_saelens,
        "sparsify": _read_sparsify,
        "gemma-scope": _read_gemma_scope,
        "gemma-scope-2": _read_gemma_scope,
    }[files.form](files, hidden, features)
    if files.form == "saelens" and subtracts_means(files.described, centring, files.refuse):
        made = without_row_means(made)
    arrays = (made.weights, made.bias, made.subtracted, made.threshold, made.scale, made.magnitude_bias)
    if not all(np.isfinite(each).all() for each in arrays if each is not None):
        raise files.refuse("contains numbers that are not finite")
    return made


def _refuse_transcoder(files: SaeFiles, hidden: int) -> None:
    """Raise SteeringError if the decoder writes another site than the encoder reads."""
    config, shapes = files.config, files.shapes
    sites: list[tuple[object, object]] = []
    if files.form == "gemma-scope-2":
        sites.append((config.get("hf_hook_point_in"), config.get("hf_hook_point_out")))
        if not any(sites[0]):
            raise files.refuse("config.json must contain equal hf_hook_point_in and hf_hook_point_out")
    elif files.form == "saelens":
        read = next((each["hook_name"] for each in files.described if each.get("hook_name")), None)
        sites += [(read, each["hook_name_out"]) for each in files.described if each.get("hook_name_out")]
    if (
        any(first != second for first, second in sites)
        or config.get("affine_connection")
        or any(name in shapes for name in _SKIPS)
        or any(name in shapes and shapes[name][-1:] != (hidden,) for name in DECODERS)
        or (files.form == "gemma-scope" and "w_enc" in shapes)
    ):
        raise files.refuse("transcoders are not supported; use an autoencoder of one site")


def _is_rescaled(files: SaeFiles) -> bool:
    """Return whether activations are multiplied by the norms of the decoder's rows, which then count as normalized."""
    return files.form == "saelens" and bool(files.config.get("rescale_acts_by_decoder_norm"))


def _decoder_factor(files: SaeFiles) -> np.float32:
    """Return the factor of a feature's activation ahead of the decoder; raise SteeringError if it is not clear."""
    name = next((name for name in DECODER_FACTORS if name in files.shapes), None)
    factor = np.float32(1.0) if name is None else files.vector(name, 1)[0]
    # For a time, SAELens saved factors of one with every autoencoder.
    if bool(files.config.get(DECODER_FACTORS[0])) != (name is not None) and (name is None or factor != 1.0):
        there = "has no such tensor" if name is None else f"has the tensor {name}, which is not used"
        raise files.refuse(f"finetuning_scaling_factor of the configuration disagrees with the weights: it {there}")
    return np.float32(factor)


def _read_gemma_scope(files: SaeFiles, hidden: int, features: int) -> SparseEncoder:
    architecture = files.config.get("architecture", "jump_relu")
    if architecture != "jump_relu":
        raise files.refuse(f"architecture {shown(architecture)} is not supported; use jump_relu")
    return SparseEncoder(
        "jumprelu",
        files.matrix(files.weights[0]),
        files.vector("b_enc", features),
        threshold=files.vector("threshold", features),
    )


def _read_sparsify(files: SaeFiles, hidden: int, features: int) -> SparseEncoder:
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


def _read_saelens(files: SaeFiles, hidden: int, features: int) -> SparseEncoder:
    config = files.config
    normalization = config.get("normalize_activations", "none")
    if normalization not in ("none", False, None):
        raise files.refuse(f"normalize_activations {shown(normalization)} is not supported; fold it into the weights")
    hooks = [str(each[key]) for each in files.described for key in _HOOK_KEYS if each.get(key)]
    # Old files of SAELens do not have the setting, which follows from the hook.
    reshaped = "hook_z" if any("hook_z" in hook for hook in hooks) else "none"
    if config.get("reshape_activations", reshaped) not in ("none", None):
        raise files.refuse("reshape_activations is not supported: such rows (hook_z) are not rows of the stream")
    if any(each.get(key) is not None for each in files.described for key in _HEAD_KEYS):
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
        # The whole file counts, also if it was opened for one feature.
        if files.shapes.get("W_dec") != files.shape[::-1]:
            raise files.refuse("W_dec does not have a row for each feature")
        norms = np.linalg.norm(files.matrix("W_dec"), axis=-1).astype(np.float32)
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


def _read_k(files: SaeFiles, value: object) -> int:
    _, features = files.shape
    if not is_integer(value) or not 1 <= value <= features:
        raise files.refuse(f"k must be 1 to {features}, not {shown(value)}")
    return int(value)
