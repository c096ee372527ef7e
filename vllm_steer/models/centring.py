# SPDX-License-Identifier: Apache-2.0
"""Autoencoders trained on TransformerLens models with ``center_writing_weights``.

For models with LayerNorm, this setting removes the mean of everything that is written to the residual stream, so rows
of the stream and of the branches are ``x - mean(x)``. vLLM's rows are ``x``. The encoder becomes one of ``x``:

    (x - mean(x) - b) @ W = x @ (W - mean of each column of W) - b @ W

Decoder directions stay as they are: every later computation reads the stream through a LayerNorm, which removes what a
direction adds to the mean. For models with RMSNorm, TransformerLens ignores the setting.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.models.recipe import qualified_name
from vllm_steer.models.vllm_recipes import MODULES
from vllm_steer.request.scalars import shown
from vllm_steer.taps.sparse_encoder import SparseEncoder

if TYPE_CHECKING:
    from vllm_steer.models.discovery import Decoder

Centring = Literal["subtract", "ignore", "unknown"]
"""What ``center_writing_weights`` does to rows of a model: subtracts their mean, nothing (ignored), or unknown."""

_TRANSFORMERS: Final = "transformers.models."
_CENTRED_LAYERS: Final = frozenset(
    (
        f"{MODULES}gpt2.GPT2Block",
        f"{MODULES}gpt_j.GPTJBlock",
        f"{_TRANSFORMERS}gpt_neox.modeling_gpt_neox.GPTNeoXLayer",
        f"{_TRANSFORMERS}phi.modeling_phi.PhiDecoderLayer",
    )
)
"""Layers of models that read the stream through LayerNorms only, and put no norm on what they add to it."""
_HOOK = re.compile(r"blocks\.\d+\.hook_(resid_pre|resid_mid|resid_post|attn_out|mlp_out)")
"""Names in TransformerLens of the activations that ``center_writing_weights`` changes."""


def centring_of(decoder: Decoder) -> Centring:
    """Return how ``center_writing_weights`` changes rows of the model of this decoder."""
    layers = {type(layer.module): layer.module for layer in decoder.layers}
    if all(qualified_name(cls) in _CENTRED_LAYERS for cls in layers):
        return "subtract"
    norms = [{type(module).__name__ for module in layer.modules()} for layer in layers.values()]
    has_rms_norms = all(any("RMSNorm" in name for name in names) for names in norms)
    has_layer_norms = any("LayerNorm" in name for names in norms for name in names)
    return "ignore" if has_rms_norms and not has_layer_norms else "unknown"


def merge_centring(ranks: Sequence[Centring]) -> Centring:
    """Return the value for a model, given the values of its ranks: each pipeline stage has only some of the layers."""
    return ranks[0] if len(set(ranks)) == 1 else "unknown"


def subtracts_means(
    described: Sequence[Mapping[str, Any]], centring: Centring, refuse: Callable[[str], SteeringError]
) -> bool:
    """Return whether an autoencoder of SAELens was trained on rows minus their mean.

    Args:
        described: The autoencoder's configuration, and the metadata in it.
        centring: How ``center_writing_weights`` changes rows of the engine's model.
        refuse: Returns the error for a problem.

    Raises:
        SteeringError: The configuration has the setting, and its effect on these rows is not known.
    """
    loading = [each.get("model_from_pretrained_kwargs") for each in described]
    if not any(isinstance(each, dict) and each.get("center_writing_weights") for each in loading):
        return False
    if centring == "ignore":
        return False
    if centring == "unknown":
        raise refuse(
            "center_writing_weights is not supported with this model, because it is not known what TransformerLens "
            "subtracts from its rows; use GPT-2, GPT-J, GPT-NeoX, Phi or a model without LayerNorm"
        )
    hook = next((each[key] for each in described for key in ("hook_name", "hook_point") if each.get(key)), None)
    if not isinstance(hook, str) or _HOOK.fullmatch(hook) is None:
        raise refuse(
            f"center_writing_weights is not supported with hook_name {shown(hook)}; use an autoencoder of "
            "hook_resid_pre, hook_resid_mid, hook_resid_post, hook_attn_out or hook_mlp_out"
        )
    return True


def without_row_means(encoder: SparseEncoder) -> SparseEncoder:
    """Return the encoder that computes from a row what ``encoder`` computes from the row minus its mean."""
    weights = encoder.weights
    bias, magnitude_bias = encoder.bias.astype(np.float64), encoder.magnitude_bias
    if encoder.subtracted is not None:
        shift = -(encoder.subtracted.astype(np.float64) @ weights)
        bias = bias + shift
        if magnitude_bias is not None and encoder.scale is not None:
            magnitude_bias = (magnitude_bias + shift * encoder.scale).astype(np.float32)
    folded = (weights - weights.mean(axis=0, dtype=np.float64)).astype(np.float32)
    return replace(
        encoder, weights=folded, bias=bias.astype(np.float32), subtracted=None, magnitude_bias=magnitude_bias
    )
