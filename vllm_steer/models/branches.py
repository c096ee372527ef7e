# SPDX-License-Identifier: Apache-2.0
"""Where the points on the branches are in each decoder-layer class, or why they are not served there.

They are there only in engines that were started with them (:data:`~vllm_steer.points.OPTIONAL_POINTS`). Where the
stream travels as two summands, the one beside the residual *is* the branch, in front of the middle norm and at the
layer's exit, so no row is needed. Where it is one tensor, the branch is whole only if some submodule gives exactly what
is added; the table below names it. The input of the MLP is what the middle norm gives, in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from vllm_steer.models.layers import ENTRY, EXIT, TRANSFORMERS
from vllm_steer.models.recipes import Recipe
from vllm_steer.points import OptionalPointName

SUMMAND: Final = "the summand beside the residual"
"""In the place of a submodule, where the stream travels as two summands."""

ONE_BRANCH: Final = "{layer} has one branch alone, which is the difference of post_block and pre_attn"
NO_ROW: Final = "no submodule of {layer} is known whose output is exactly what is added to the stream"
MULTIPLIED: Final = "{layer} multiplies the branch where it adds it, so no tensor is what is added to the stream"
SIDE_BY_SIDE: Final = "in {layer} the MLP runs beside attention, on the block's own input"
ON_STREAM: Final = "in {layer} the MLP computes on the stream itself, without a norm; use post_attn"
NORM_ON_SUM: Final = "this {layer} norms the sum and not the branch, so its branches are not what the stream grows by"
ADAPTED: Final = "this {layer} scales the norm's output by a second input before the MLP computes on it"
BIASED: Final = "{layer} adds the bias of the branch where it adds the branch to the stream"
RESCALED: Final = "{layer} scales the whole stream behind its MLP, so the branch is not what the stream grows by"
NOT_PROVEN: Final = "{layer} computes in bfloat16 alone, in which this point could not be proven"
TWO_INPUTS: Final = "this {layer} gives its MLP and its experts different norms of the stream"
SUMMED_LATE: Final = (
    "under tensor parallelism {layer} adds attention and MLP up over the ranks together, so no rank has this branch"
)

_VLLM: Final = "vllm.model_executor.models."
_HF: Final = "transformers.models."
_POST_NORMS: Final = ("post_attention_layernorm", "post_feedforward_layernorm")

BRANCHES: Final[Mapping[str, tuple[str, str]]] = {
    f"{_VLLM}bloom.BloomBlock": ("self_attention", "mlp"),
    f"{_VLLM}chatglm.GLMBlock": ("self_attention", "mlp"),
    f"{_VLLM}commandr.CohereDecoderLayer": ("self_attn", "mlp"),
    f"{_VLLM}dbrx.DbrxBlock": ("norm_attn_norm.attn", "ffn"),
    f"{_VLLM}exaone4.Exaone4DecoderLayer": _POST_NORMS,
    f"{_VLLM}falcon.FalconDecoderLayer": ("self_attention", "mlp"),
    f"{_VLLM}gpt2.GPT2Block": ("attn", "mlp"),
    f"{_VLLM}gpt_j.GPTJBlock": ("attn", "mlp"),
    f"{_VLLM}opt.OPTDecoderLayer": ("self_attn", "fc2"),
    f"{_VLLM}orion.OrionDecoderLayer": ("self_attn", "mlp"),
    f"{_VLLM}phimoe.PhiMoEDecoderLayer": ("self_attn", "block_sparse_moe"),
    f"{_VLLM}stablelm.StablelmDecoderLayer": ("self_attn", "mlp"),
    f"{_VLLM}step3p5.Step3p5DecoderLayer": ("self_attn", "moe|mlp"),
    f"{_HF}gpt_neox.modeling_gpt_neox.GPTNeoXLayer": ("attention", "mlp"),
    f"{_HF}phi.modeling_phi.PhiDecoderLayer": ("self_attn", "mlp"),
    **{_HF + layer: _POST_NORMS if mid == "mlp" else ("self_attn", "mlp") for layer, mid in TRANSFORMERS.items()},
    f"{_HF}gpt_bigcode.modeling_gpt_bigcode.GPTBigCodeBlock": ("attn", "mlp"),
    # The other branch of these is multiplied, or there are several: see below.
    f"{_VLLM}falcon_h1.FalconH1ParallelHybrid": ("", "feed_forward"),
    f"{_VLLM}gemma4.Gemma4DecoderLayer": ("post_attention_layernorm", ""),
}
"""Layers of one tensor: the submodules whose outputs are the attention and the MLP branch; of names with ``|`` between
them, the first that the layer has."""

_BOTH: Final = ("attn_out", "mlp_out")
_MULTIPLIED: Final = dict.fromkeys(_BOTH, MULTIPLIED)

NOT_SERVED: Final[Mapping[str, Mapping[str, str]]] = {
    **{
        _VLLM + layer: _MULTIPLIED
        for layer in (
            "granite.GraniteDecoderLayer",
            "granitemoe.GraniteMoeDecoderLayer",
            "granitemoehybrid.GraniteMoeHybridAttentionDecoderLayer",
            "granitemoehybrid.GraniteMoeHybridMambaDecoderLayer",
            "granitemoeshared.GraniteMoeSharedDecoderLayer",
            "hyperclovax.HyperCLOVAXDecoderLayer",
            "minicpm.MiniCPMDecoderLayer",
            "minicpm3.MiniCPM3DecoderLayer",
        )
    },
    f"{_VLLM}falcon_h1.FalconH1ParallelHybrid": {"attn_out": MULTIPLIED},
    f"{_VLLM}gemma4.Gemma4DecoderLayer": {"mlp_out": RESCALED},
    f"{_VLLM}bailing_moe_linear.BailingMoeV25DecoderLayer": {"mlp_out": NOT_PROVEN},
    # Two kinds of block in one class, and none of them proven.
    f"{_VLLM}olmo_hybrid.OlmoHybridDecoderLayer": {"mlp_in": NO_ROW},
    f"{_VLLM}muse_glimmer.MuseGlimmerDecoderLayer": {"mlp_in": NO_ROW},
}
"""The reasons why single points of a class are not served."""


def _mistral(layer: Any) -> Mapping[str, str]:
    return {} if getattr(layer, "ada_rms_norm_t_cond", None) is None else {"mlp_in": ADAPTED}


def _opt(layer: Any) -> Mapping[str, str]:
    return {} if layer.do_layer_norm_before else dict.fromkeys((*_BOTH, "mlp_in"), NORM_ON_SUM)


def _gemma4(layer: Any) -> Mapping[str, str]:
    return {"mlp_in": TWO_INPUTS} if layer.enable_moe_block else {}


def _falcon(layer: Any) -> Mapping[str, str]:
    return dict.fromkeys(_BOTH, BIASED) if layer.config.bias else {}


_BY_SETTINGS: Final[Mapping[str, Callable[[Any], Mapping[str, str]]]] = {
    f"{_VLLM}mistral.MistralDecoderLayer": _mistral,
    f"{_VLLM}opt.OPTDecoderLayer": _opt,
    f"{_VLLM}gemma4.Gemma4DecoderLayer": _gemma4,
    f"{_VLLM}falcon.FalconDecoderLayer": _falcon,
}


def not_served(point: OptionalPointName, recipe: Recipe, layer: Any, tensor_parallel: bool = False) -> str | None:
    """Why a point is neither edited nor read on this layer, or None. ``recipe`` is that of this very layer."""
    reason = why_not(point, recipe)
    if reason is None:
        reason = _BY_SETTINGS.get(recipe.layer, lambda layer: {})(layer).get(point)
    if reason is None and tensor_parallel and recipe.branch is not None and recipe.branch.partial:
        reason = SUMMED_LATE
    return None if reason is None else reason.format(layer=type(layer).__name__)


def why_not(point: OptionalPointName, recipe: Recipe) -> str | None:
    """As :func:`not_served`, of a class whatever its settings; ``{layer}`` stands for its name."""
    if point in NOT_SERVED.get(recipe.layer, {}):
        return NOT_SERVED[recipe.layer][point]
    if recipe.mid in (ENTRY, EXIT):
        return ONE_BRANCH
    if recipe.shape == "pair":
        return recipe.no_mid if recipe.mid is None else None
    if point == "mlp_in":
        return SIDE_BY_SIDE if recipe.mid is None else ON_STREAM if recipe.mid == "mlp" else None
    return None if recipe.layer in BRANCHES else NO_ROW


def place_of(point: OptionalPointName, recipe: Recipe, layer: Any) -> str:
    """Where a point that is served is: :data:`SUMMAND`, or the submodule of the layer whose output (the first, where
    there are several) is its value."""
    if point == "mlp_in":
        return str(recipe.mid)
    if recipe.shape == "pair":
        return SUMMAND
    names = BRANCHES[recipe.layer][_BOTH.index(point)].split("|")
    return next(name for name in names if getattr(layer, name.partition(".")[0], None) is not None)
