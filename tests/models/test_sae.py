# SPDX-License-Identifier: Apache-2.0
"""Encoders read from files of each format, against their published formulas."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from vllm_steer import SteeringError
from vllm_steer.models.sae import check_encoder, encoder_bytes, encoder_shape, read_encoder, read_feature
from vllm_steer.models.sae_features import FeatureReader
from vllm_steer.models.sae_site import check_model, read_site
from vllm_steer.program.feature import SaeSite
from vllm_steer.taps.heads import top_k_outputs
from vllm_steer.taps.sparse_encoder import SparseEncoderHead

HIDDEN, FEATURES, ROWS, K = 6, 20, 9, 3
CENTRED = {"center_writing_weights": True}
RANDOM = np.random.default_rng(4)
W, W_DEC = RANDOM.standard_normal((2, HIDDEN, FEATURES)).astype(np.float32)
B_ENC, THRESHOLD, R_MAG, B_MAG = (RANDOM.standard_normal((4, FEATURES)) * 0.3).astype(np.float32)
B_DEC = RANDOM.standard_normal(HIDDEN).astype(np.float32)
X = RANDOM.standard_normal((ROWS, HIDDEN)).astype(np.float32)
LENS_TENSORS = {"W_enc": W, "b_enc": B_ENC, "b_dec": B_DEC, "W_dec": np.ascontiguousarray(W_DEC.T)}
relu: Callable[[Any], Any] = lambda x: np.maximum(x, 0)  # noqa: E731


def top(acts: Any) -> Any:
    """Return activations with all but the K largest of a row set to 0."""
    smallest = np.sort(acts, axis=-1)[:, -K][:, None]
    return np.where(acts >= smallest, acts, 0)


def write(folder: Path, weights: str, tensors: dict[str, Any], config: dict[str, Any] | None = None) -> str:
    folder.mkdir(exist_ok=True)
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    if weights.endswith(".npz"):
        np.savez_compressed(folder / weights, **tensors)
    else:
        save_file(tensors, folder / weights)
        name = "config.json" if weights.startswith("params") else "cfg.json"
        (folder / name).write_text(json.dumps(config or {}))
    return str(folder)


def saelens(**config: Any) -> Callable[[Path], str]:
    tensors = dict(LENS_TENSORS)
    if config.get("architecture") in ("jumprelu", "batchtopk"):
        tensors["threshold"] = THRESHOLD
    if config.get("architecture") == "gated":
        del tensors["b_enc"]
        tensors |= {"b_gate": B_ENC, "r_mag": R_MAG, "b_mag": B_MAG}
    return lambda folder: write(folder, "sae_weights.safetensors", tensors, config)


def sparsify(**config: Any) -> Callable[[Path], str]:
    tensors = {"encoder.weight": W.T, "encoder.bias": B_ENC, "b_dec": B_DEC, "W_dec": W_DEC.T}
    return lambda folder: write(folder, "sae.safetensors", tensors, {"k": K, "activation": "topk", **config})


SCOPE = {"b_enc": B_ENC, "b_dec": B_DEC, "threshold": THRESHOLD}
PRE, RAW = (X - B_DEC) @ W + B_ENC, X @ W + B_ENC
NORMS = np.linalg.norm(W_DEC, axis=0)
CASES: dict[str, tuple[Callable[[Path], str], Any]] = {
    "saelens standard": (saelens(architecture="standard", apply_b_dec_to_input=False), relu(RAW)),
    "saelens old": (saelens(activation_fn_str="relu"), relu(PRE)),
    "saelens jumprelu": (
        saelens(architecture="jumprelu", apply_b_dec_to_input=True), np.where(PRE > THRESHOLD, relu(PRE), 0)
    ),
    "saelens batchtopk": (
        saelens(architecture="batchtopk", apply_b_dec_to_input=True), np.where(PRE > THRESHOLD, relu(PRE), 0)
    ),
    "saelens batchtopk, rescaled": (
        saelens(architecture="batchtopk", rescale_acts_by_decoder_norm=True),
        np.where(PRE * NORMS > THRESHOLD, relu(PRE * NORMS), 0),
    ),
    "saelens topk of version 5": (
        saelens(architecture="topk", activation_fn_str="topk", activation_fn_kwargs={"k": K}), top(relu(PRE))
    ),
    "saelens topk": (saelens(architecture="topk", k=K), top(relu(PRE))),
    "saelens topk, rescaled": (
        saelens(architecture="topk", k=K, rescale_acts_by_decoder_norm=True), top(relu(PRE * NORMS))
    ),
    "saelens old topk": (saelens(activation_fn_str="topk", activation_fn_kwargs={"k": K}), top(relu(PRE))),
    "saelens gated": (
        saelens(architecture="gated"),
        np.where(PRE > 0, relu((X - B_DEC) @ (W * np.exp(R_MAG)) + B_MAG), 0),
    ),
    "gemma scope": (
        lambda folder: write(folder, "params.npz", {"W_enc": W, "W_dec": W_DEC.T, **SCOPE}),
        np.where(RAW > THRESHOLD, relu(RAW), 0),
    ),
    "gemma scope 2": (
        lambda folder: write(
            folder, "params.safetensors", {"w_enc": W, "w_dec": W_DEC.T, **SCOPE},
            {"architecture": "jump_relu", "hf_hook_point_in": "a", "hf_hook_point_out": "a"},
        ),
        np.where(RAW > THRESHOLD, relu(RAW), 0),
    ),
    "sparsify": (sparsify(), top(relu(PRE))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_encoder_equals_its_formula(name: str, tmp_path: Path) -> None:
    """Catches a transposed matrix, a forgotten or wrong bias, another activation, and inactive features with a name."""
    make, expected = CASES[name]
    folder = make(tmp_path / "sae")
    assert encoder_shape(folder, "f") == (HIDDEN, FEATURES)
    head = SparseEncoderHead(read_encoder(folder, "f"), torch.device("cpu"), torch.float32)
    assert head.num_bytes <= encoder_bytes((HIDDEN, FEATURES))
    for k in (2, 8):
        found = top_k_outputs(head.products(torch.from_numpy(X)), head.activation, k)
        indices, values = found[:, :k].long().numpy(), found[:, k:].numpy()
        order = np.argsort(-expected, axis=-1)[:, :k]
        wanted = np.take_along_axis(expected, order, -1)
        np.testing.assert_allclose(values, wanted, atol=1e-5)
        np.testing.assert_array_equal(indices, np.where(wanted > 0, order, -1))


@pytest.mark.parametrize("name", CASES)
def test_feature_equals_its_formula(name: str, tmp_path: Path) -> None:
    """Catches another feature's row, a constant that is not folded in, and a TopK activation taken for a ReLU's."""
    make, expected = CASES[name]
    folder = make(tmp_path / "sae")
    reader = FeatureReader({"x": folder})
    for index in (0, 13, FEATURES - 1):
        found = reader.feature("x", index, "steering[0]")
        decoder = W_DEC[:, index] / (NORMS[index] if "rescaled" in name else 1.0)
        np.testing.assert_allclose(found.decoder, decoder, rtol=1e-6)
        assert bool(found.problem) == ("topk" in name.replace("batchtopk", "") or name == "sparsify")
        if not found.problem:
            before = X @ found.encoder + found.bias
            np.testing.assert_allclose(np.where(before > found.threshold, before, 0), expected[:, index], atol=1e-5)
    with pytest.raises(SteeringError, match="feature 20 does not exist"):
        reader.feature("x", FEATURES, "steering[0]")


@pytest.mark.parametrize("name", ["finetuning_scaling_factor", "scaling_factor"])
def test_decoder_after_finetuning(name: str, tmp_path: Path) -> None:
    """Catches edits of a feature without the factor that finetuning has put ahead of the decoder."""
    factors = np.linspace(0.5, 2.0, FEATURES, dtype=np.float32)

    def folder(number: int, factor: Any, **config: Any) -> str:
        tensors = LENS_TENSORS | ({} if factor is None else {name: factor})
        return write(tmp_path / str(number), "sae_weights.safetensors", tensors, config)

    finetuned = folder(0, factors, finetuning_scaling_factor=True)
    for index in (0, FEATURES - 1):
        encoder, decoder = read_feature(finetuned, index, "f")
        np.testing.assert_allclose(decoder, W_DEC[:, index] * factors[index], rtol=1e-6)
        np.testing.assert_array_equal(encoder.weights[:, 0], W[:, index])
    np.testing.assert_array_equal(read_feature(folder(1, np.ones(FEATURES, "f4")), 3, "f")[1], W_DEC[:, 3])
    for number, (factor, config) in enumerate([(factors, {}), (None, {"finetuning_scaling_factor": True})], 2):
        with pytest.raises(SteeringError, match="finetuning_scaling_factor of the configuration disagrees"):
            read_feature(folder(number, factor, **config), 3, "f")


def test_feature_of_an_uncompressed_archive(tmp_path: Path) -> None:
    """Catches a wrong offset in the mapped file."""
    tensors = {"W_enc": W, "W_dec": np.ascontiguousarray(W_DEC.T), **SCOPE}
    np.savez(tmp_path / "params.npz", **tensors)
    encoder, decoder = read_feature(str(tmp_path), 7, "f")
    np.testing.assert_array_equal(decoder, W_DEC[:, 7])
    np.testing.assert_array_equal(encoder.weights, W[:, 7:8])
    assert encoder.bias == B_ENC[7] and encoder.threshold == THRESHOLD[7]


def test_feature_without_a_decoder(tmp_path: Path) -> None:
    """Catches a file with only an encoder."""
    np.savez(tmp_path / "params.npz", W_enc=W, **SCOPE)
    with pytest.raises(SteeringError, match="has no decoder of shape"):
        read_feature(str(tmp_path), 7, "f")


def unequal_hooks(folder: Path) -> str:
    config = {"hf_hook_point_in": "a", "hf_hook_point_out": "b"}
    return write(folder, "params.safetensors", {"w_enc": W, **SCOPE}, config)


def without_hooks(folder: Path) -> str:
    return write(folder, "params.safetensors", {"w_enc": W, **SCOPE}, {"architecture": "jump_relu"})


def lower_case(folder: Path) -> str:
    return write(folder, "params.npz", {"w_enc": W, "w_dec": W_DEC.T, **SCOPE})


def wider_output(folder: Path) -> str:
    return write(folder, "params.npz", {"W_enc": W, "W_dec": np.ones((FEATURES, HIDDEN + 1), np.float32), **SCOPE})


def with_skip(folder: Path) -> str:
    tensors = {"encoder.weight": W.T, "encoder.bias": B_ENC, "b_dec": B_DEC, "W_skip": np.eye(HIDDEN, dtype=np.float32)}
    return write(folder, "sae.safetensors", tensors, {"k": K})


def pickled(folder: Path) -> str:
    folder.mkdir()
    np.savez(folder / "params.npz", W_enc=np.array([{"a": 1}], dtype=object))
    return str(folder)


def short_bias(folder: Path) -> str:
    return write(folder, "sae_weights.safetensors", {**LENS_TENSORS, "b_enc": B_ENC[:-1]})


def long_threshold(folder: Path) -> str:
    tensors = {**LENS_TENSORS, "threshold": np.tile(THRESHOLD, 2)}
    return write(folder, "sae_weights.safetensors", tensors, {"architecture": "jumprelu"})


def short_decoder(folder: Path) -> str:
    config = {"architecture": "topk", "k": K, "rescale_acts_by_decoder_norm": True}
    return write(folder, "sae_weights.safetensors", {**LENS_TENSORS, "W_dec": W_DEC.T[:-1]}, config)


def quantised(folder: Path) -> str:
    return write(folder, "sae_weights.safetensors", {**LENS_TENSORS, "W_enc": (W * 50).astype(np.int8)})


def cut(folder: Path) -> str:
    """Write an archive whose decoder lacks its last row."""
    folder.mkdir()
    whole = {"W_dec": np.ascontiguousarray(W_DEC.T), "W_enc": W, **SCOPE}
    with zipfile.ZipFile(folder / "params.npz", "w") as archive:
        for name, array in whole.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array)
            archive.writestr(f"{name}.npy", buffer.getvalue()[: -4 * HIDDEN if name == "W_dec" else None])
    return str(folder)


def not_finite(folder: Path) -> str:
    return write(folder, "sae_weights.safetensors", {**LENS_TENSORS, "b_enc": np.full(FEATURES, np.nan, np.float32)})


def damaged(folder: Path) -> str:
    folder.mkdir()
    (folder / "params.npz").write_bytes(b"PK\x03\x04 no archive")
    return str(folder)


def damaged_array(folder: Path) -> str:
    written = write(folder, "params.npz", {"W_enc": W, **SCOPE})
    data = bytearray((folder / "params.npz").read_bytes())
    data[60:80] = bytes(255 - each for each in data[60:80])
    (folder / "params.npz").write_bytes(data)
    return written


def unclosed_header(folder: Path) -> str:
    """Write an array whose header lacks a bracket: numpy's tokenizer raises TokenError."""
    folder.mkdir()
    header = b"{'descr': ('<f4'".ljust(117) + b"\n"
    with zipfile.ZipFile(folder / "params.npz", "w") as archive:
        archive.writestr("W_enc.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    return str(folder)


def zipped_arrays(*names: str, method: int = zipfile.ZIP_STORED) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        folder.mkdir()
        with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(folder / "params.npz", "w", method) as archive:
            for name in names:
                buffer = io.BytesIO()
                np.lib.format.write_array(buffer, W)
                archive.writestr(name, buffer.getvalue())
        return str(folder)

    return write


def encrypted(folder: Path) -> str:
    written = write(folder, "params.npz", {"W_enc": W, **SCOPE})
    data = bytearray((folder / "params.npz").read_bytes())
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (folder / "params.npz").write_bytes(data)
    return written


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: str(folder), "has no autoencoder; expected"),
        (saelens(normalize_activations="expected_average_only_in"), "normalize_activations"),
        (saelens(architecture="temporal"), "architecture 'temporal'"),
        (saelens(architecture="topk", k=0), "k must be 1 to 20"),
        (saelens(activation_fn_str="tanh-relu"), "activation_fn"),
        (saelens(metadata={"hook_head_index": 3}), "one attention head"),
        (saelens(hook_point_head_index=3), "one attention head"),
        (saelens(reshape_activations="hook_z"), "reshape_activations"),
        (saelens(hook_point="blocks.3.attn.hook_z"), "reshape_activations"),
        (saelens(architecture="topk", activation_fn_kwargs=[K]), "k must be 1 to 20"),
        (saelens(model_from_pretrained_kwargs=CENTRED), "center_writing_weights"),
        (saelens(metadata={"model_from_pretrained_kwargs": CENTRED}), "center_writing_weights"),
        (sparsify(transcode=True), "transcode is not supported"),
        (sparsify(activation="groupmax"), "activation 'groupmax'"),
        (saelens(architecture="jumprelu", rescale_acts_by_decoder_norm=True), "rescale_acts_by_decoder_norm"),
        (saelens(metadata={"hook_name": "a", "hook_name_out": "b"}), "transcoders"),
        (unequal_hooks, "transcoders"),
        (without_hooks, "equal hf_hook_point_in"),
        (lower_case, "transcoders"),
        (wider_output, "transcoders"),
        (with_skip, "transcoders"),
        (pickled, "floating-point"),
        (damaged, "cannot be read"),
        (damaged_array, "cannot be read"),
        (encrypted, "cannot be read"),
        (unclosed_header, "cannot be read"),
        (zipped_arrays("W_enc.npy", "W_enc.npy"), "two arrays with the name W_enc.npy"),
        (zipped_arrays("W_enc.npy", "W_enc"), "two arrays with the name W_enc"),
        (zipped_arrays("W_enc.npy", method=zipfile.ZIP_BZIP2), "a compression other than deflate"),
        (short_bias, "b_enc has 19 numbers, expected 20"),
        (long_threshold, "threshold has 40 numbers, expected 20"),
        (quantised, "W_enc of .* must have the dtype F64, F32, F16, BF16, not I8"),
        (cut, r"x: W_dec.npy of .* has 584 bytes; its shape \(20, 6\) has 608"),
        (not_finite, "not finite"),
    ],
)
def test_refused(make: Callable[[Path], str], words: str, tmp_path: Path) -> None:
    """Catches (1) an encoder computed by another formula, (2) a decoder of another site, (3) another kind of error."""
    with pytest.raises(SteeringError, match=words) as refused:
        read_encoder(make(tmp_path / "sae"), "steering_config.saes.x")
    assert refused.value.field == "steering_config.saes.x"


@pytest.mark.parametrize("make", [lower_case, saelens(architecture="jumprelu", rescale_acts_by_decoder_norm=True)])
def test_refused_as_a_feature(make: Callable[[Path], str], tmp_path: Path) -> None:
    """Catches an edit that writes a direction of another site or of another norm."""
    with pytest.raises(SteeringError, match="not supported"):
        read_feature(make(tmp_path / "sae"), 3, "steering[0]")


@pytest.mark.parametrize("make", [short_bias, long_threshold, quantised, cut])
def test_one_feature_is_refused_with_the_rest(make: Callable[[Path], str], tmp_path: Path) -> None:
    """Catches a feature, and an autoencoder that doctor accepts, of files that an engine refuses."""
    folder = make(tmp_path / "sae")
    with pytest.raises(SteeringError) as refused:
        read_encoder(folder, "f")
    for read in (lambda: read_feature(folder, 3, "f"), lambda: check_encoder(folder, "f", HIDDEN, "ignore")):
        with pytest.raises(SteeringError) as again:
            read()
        assert again.value.problem == refused.value.problem


def test_feature_of_vectors_with_two_dimensions(tmp_path: Path) -> None:
    """Catches a refusal of one feature, and by doctor, of an autoencoder that an engine serves."""
    folder = write(tmp_path / "sae", "sae_weights.safetensors", {**LENS_TENSORS, "b_enc": B_ENC[None]})
    np.testing.assert_array_equal(read_encoder(folder, "f").bias, B_ENC)
    assert check_encoder(folder, "f", HIDDEN, "ignore") == (HIDDEN, FEATURES)
    assert read_feature(folder, 7, "f")[0].bias == B_ENC[7]


def test_doctor_refuses_a_decoder_whose_norms_an_engine_lacks(tmp_path: Path) -> None:
    """Catches an autoencoder that doctor accepts because it has a row for the one feature that doctor reads."""
    folder = short_decoder(tmp_path / "sae")
    for read in (lambda: read_encoder(folder, "f"), lambda: check_encoder(folder, "f", HIDDEN, "ignore")):
        with pytest.raises(SteeringError, match="W_dec does not have a row for each feature"):
            read()


GPT2 = ["/models/gpt2", "prod"]
SITES: dict[str, tuple[Callable[[Path], str], str, SaeSite]] = {
    "saelens 6": (
        saelens(metadata={"hook_name": "blocks.3.hook_resid_post"}), "s",
        SaeSite("blocks.3.hook_resid_post", "post_block", 3, exact=True),
    ),
    "saelens 3": (
        saelens(hook_point="blocks.4.hook_mlp_out", hook_point_layer=4), "s",
        SaeSite("blocks.4.hook_mlp_out", "mlp_out", 4, exact=True),
    ),
    "elsewhere": (
        saelens(hook_name="blocks.3.ln1.hook_normalized", hook_layer=3), "s",
        SaeSite("blocks.3.ln1.hook_normalized", None, 3, known=False),
    ),
    "nothing": (saelens(), "s", SaeSite()),
    "sparsify": (sparsify(), "layers.5", SaeSite("layers.5", "post_block", 5, exact=True)),
    "sparsify, mlp": (sparsify(), "layers.5.mlp", SaeSite("layers.5.mlp", "mlp_out", 5)),
    "sparsify, another folder": (sparsify(), "sae", SaeSite()),
    "gemma scope": (
        CASES["gemma scope"][0], "models--google--gemma-scope-2b-pt-res/snapshots/0a/layer_20/width_16k",
        SaeSite("resid_post, layer 20", "post_block", 20, exact=True),
    ),
    "gemma scope, heads": (
        CASES["gemma scope"][0], "gemma-scope-2b-pt-att/layer_2/width_16k",
        SaeSite("attn.hook_z, layer 2", None, 2, known=False),
    ),
    "gemma scope, moved": (CASES["gemma scope"][0], "layer_2/x", SaeSite("layer 2", None, 2)),
    "gemma scope 2": (CASES["gemma scope 2"][0], "s", SaeSite("a", known=False)),
}  # fmt: skip


@pytest.mark.parametrize("name", SITES)
def test_site_that_the_files_name(name: str, tmp_path: Path) -> None:
    """Catches the site of another block or branch, and a site that is invented where the files name none."""
    make, folder, expected = SITES[name]
    (tmp_path / folder).parent.mkdir(parents=True, exist_ok=True)
    assert read_site(make(tmp_path / folder), "f") == expected


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        (("post_block", (3,)), True),
        (("pre_attn", (4,)), True),  # the same place in the stream
        ((None, (3,)), True),
        (("post_block", None), True),
        (("post_block", (2,)), False),
        (("post_block", (4,)), False),
        (("pre_attn", (3,)), False),
        (("mlp_out", (3,)), False),
        (("mlp_out", None), False),
        ((None, (20,)), False),
        (("post_block", (3, 4)), False),
        (("post_block", ()), False),  # all layers
    ],
)
def test_sites_that_fit(given: Any, fits: bool) -> None:
    """Catches an autoencoder that is served one block off, at a branch or at all layers."""
    assert SaeSite("blocks.3.hook_resid_post", "post_block", 3, exact=True).matches(*given) == fits
    assert SaeSite().matches(*given)
    assert not SaeSite("attn.hook_z", None, 3, known=False).matches(*given)
    assert SaeSite("layer 3", None, 3).matches(*given) == (given[1] in (None, (3,)))


def test_another_model_is_refused(tmp_path: Path) -> None:
    """Catches an autoencoder of another model of the same width, and the same model under another name refused."""
    for made_for, models in (
        ("gpt2-small", GPT2),
        ("google/gemma-2-2b", ["/x/models--google--gemma-2-2b/snapshots/0a1/", "prod"]),
        ("meta-llama/Llama-3.1-8B", ["llama-3.1-8b"]),
        ("prod", GPT2),
    ):
        check_model(saelens(metadata={"model_name": made_for})(tmp_path / "a"), "f", models)
    check_model(saelens()(tmp_path / "b"), "f", GPT2)
    for made_for in ("gpt2-medium", "gemma-2-2b-it"):
        with pytest.raises(SteeringError, match=f"'{made_for}', not for '/models/gpt2' or 'prod'.*--steering-sae-any"):
            check_model(saelens(model_name=made_for)(tmp_path / "c"), "f", GPT2)
