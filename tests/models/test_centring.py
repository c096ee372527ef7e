# SPDX-License-Identifier: Apache-2.0
"""Autoencoders trained on rows minus their mean (``center_writing_weights``), against their formulas on such rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.conformance.reference_process import ReferenceProcess
from tests.models.centred_models import Outputs, plain_and_centred
from tests.models.test_discovery import layer
from tests.models.test_sae import (
    B_DEC,
    B_ENC,
    B_MAG,
    CENTRED,
    FEATURES,
    R_MAG,
    THRESHOLD,
    W_DEC,
    K,
    W,
    X,
    relu,
    saelens,
    top,
)
from vllm_steer import SteeringError
from vllm_steer.models.centring import _CENTRED_LAYERS, centring_of, merge_centring
from vllm_steer.models.recipes import RECIPES
from vllm_steer.models.sae import read_encoder
from vllm_steer.models.sae_features import FeatureReader
from vllm_steer.taps.heads import top_k_outputs
from vllm_steer.taps.sparse_encoder import SparseEncoderHead

HOOK = "blocks.8.hook_resid_pre"
GPT2 = "vllm.model_executor.models.gpt2.GPT2Block"
OFFSET = np.linspace(-6, 6, len(X), dtype=np.float32)[:, None]
ROWS = X + OFFSET
MINUS_MEAN = ROWS - ROWS.mean(axis=1, keepdims=True)
PRE, RAW = (MINUS_MEAN - B_DEC) @ W + B_ENC, MINUS_MEAN @ W + B_ENC
NORMS = np.linalg.norm(W_DEC, axis=0)
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "standard": ({"architecture": "standard"}, relu(PRE)),
    "without b_dec": ({"architecture": "standard", "apply_b_dec_to_input": False}, relu(RAW)),
    "jumprelu": ({"architecture": "jumprelu"}, np.where(PRE > THRESHOLD, relu(PRE), 0)),
    "gated": (
        {"architecture": "gated"},
        np.where(PRE > 0, relu((MINUS_MEAN - B_DEC) @ (W * np.exp(R_MAG)) + B_MAG), 0),
    ),
    "topk, rescaled": (
        {"architecture": "topk", "k": K, "rescale_acts_by_decoder_norm": True}, top(relu(PRE * NORMS)),
    ),
}  # fmt: skip


def centred(folder: Path, hook: str | None = HOOK, **config: Any) -> str:
    """Write an autoencoder whose configuration has the setting."""
    return saelens(metadata={"model_from_pretrained_kwargs": CENTRED, "hook_name": hook}, **config)(folder / "sae")


@pytest.mark.parametrize("name", CASES)
def test_encoder_equals_its_formula_on_rows_minus_their_mean(name: str, tmp_path: Path) -> None:
    """Catches rows whose mean counts, and ``b_dec`` or its part in the magnitudes lost with it."""
    config, expected = CASES[name]
    head = SparseEncoderHead(
        read_encoder(centred(tmp_path, **config), "f", "subtract"), torch.device("cpu"), torch.float32
    )
    found = top_k_outputs(head.products(torch.from_numpy(ROWS)), head.activation, expected.shape[1])
    values = found[:, expected.shape[1] :].numpy()
    np.testing.assert_allclose(values, -np.sort(-expected, axis=1), atol=2e-5)


@pytest.mark.parametrize("name", [name for name in CASES if "topk" not in name])
def test_feature_equals_its_formula_on_rows_minus_their_mean(name: str, tmp_path: Path) -> None:
    """Catches an edit that reads another activation than the readout, or writes another direction."""
    config, expected = CASES[name]
    reader = FeatureReader({"x": centred(tmp_path, **config)}, "subtract")
    for index in (0, FEATURES - 1):
        found = reader.feature("x", index, "steering[0]")
        np.testing.assert_allclose(found.decoder, W_DEC[:, index], rtol=1e-6)
        before = ROWS @ found.encoder + found.bias
        np.testing.assert_allclose(np.where(before > found.threshold, before, 0), expected[:, index], atol=2e-5)


def test_setting_is_ignored_where_transformer_lens_ignores_it(tmp_path: Path) -> None:
    """Catches a mean that is subtracted for models with RMSNorm, whose rows TransformerLens does not centre."""
    folder = centred(tmp_path, hook="blocks.1.hook_anything")
    np.testing.assert_array_equal(read_encoder(folder, "f", "ignore").weights, W)
    np.testing.assert_array_equal(read_encoder(folder, "f", "ignore").subtracted, B_DEC)


@pytest.mark.parametrize("hook", ["blocks.8.mlp.hook_post", "blocks.8.ln2.hook_normalized", None])
def test_other_rows_are_refused(hook: str | None, tmp_path: Path) -> None:
    """Catches a mean subtracted from rows that the setting does not change, or that are not known."""
    with pytest.raises(SteeringError, match="not supported with hook_name"):
        read_encoder(centred(tmp_path, hook), "f", "subtract")


def test_old_name_of_the_hook(tmp_path: Path) -> None:
    """Catches files of SAELens before version 6, such as those of GPT-2 small, that are refused for their keys."""
    folder = saelens(model_from_pretrained_kwargs=CENTRED, hook_point=HOOK)(tmp_path / "sae")
    assert not np.allclose(read_encoder(folder, "f", "subtract").weights, W)


def decoder_of(*layers: nn.Module) -> Any:
    return SimpleNamespace(layers=[SimpleNamespace(module=each) for each in layers])


def block(*norms: str) -> nn.Module:
    made = nn.Module()
    for name in norms:
        setattr(made, name.lower(), type(name, (nn.Module,), {})())
    return made


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([layer(GPT2), layer(GPT2)], "subtract"),
        ([layer("vllm.model_executor.models.bloom.BloomBlock")], "unknown"),
        ([layer("vllm.model_executor.models.opt.OPTDecoderLayer")], "unknown"),
        ([layer(GPT2), block("RMSNorm")], "unknown"),
        ([block("RMSNorm"), block("GemmaRMSNorm")], "ignore"),
        ([block("RMSNorm", "LayerNorm")], "unknown"),
        ([block("RMSNorm"), block()], "unknown"),
        ([block()], "unknown"),
    ],
)
def test_what_the_setting_does_to_a_model(layers: list[nn.Module], expected: str) -> None:
    """Catches a model with a norm on its stream that counts as centred, and one with both norms taken for another."""
    assert centring_of(decoder_of(*layers)) == expected


def test_centred_layers_have_recipes() -> None:
    """Catches a misspelt class, whose models would be refused."""
    assert set(RECIPES) >= _CENTRED_LAYERS


@pytest.fixture(scope="module")
def process() -> Iterator[ReferenceProcess]:
    with ReferenceProcess() as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "embeddings", "projections", "axis"),
    [
        ("gpt2_untied", ("wte", "wpe"), ("c_proj",), -1),
        ("gptj", ("wte",), ("out_proj", "fc_out"), 0),
        ("gpt_neox", ("embed_in",), ("attention.dense", "dense_4h_to_h"), 0),
        ("phi", ("embed_tokens",), ("self_attn.dense", "fc2"), 0),
    ],
)
def test_centred_models_compute_the_same(
    process: ReferenceProcess, name: str, embeddings: tuple[str, ...], projections: tuple[str, ...], axis: int
) -> None:
    """Catches a model in the table whose outputs change with its row means, or whose centred rows are others.

    ``axis`` is the axis of the rows' components in the weights of projections.
    """
    found: Outputs = process.run(plain_and_centred, name, embeddings, projections, axis)
    assert found.centred > 2 * found.layers
    mean = found.plain_rows.mean(-1, keepdim=True)
    assert mean.abs().min() > 1e-3
    torch.testing.assert_close(found.plain_rows - mean, found.centred_rows, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.plain_logits, found.centred_logits, atol=1e-4, rtol=1e-4)


def test_stages_that_differ() -> None:
    """Catches a model of which one pipeline stage decides for the others."""
    assert merge_centring(["subtract", "subtract"]) == "subtract"
    assert merge_centring(["ignore", "subtract"]) == "unknown"
