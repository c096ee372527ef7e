# SPDX-License-Identifier: Apache-2.0
"""Recipes of vLLM's own decoder-layer classes: one row per class, proven by ``tests/conformance``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from vllm_steer.models import streams
from vllm_steer.models.convolved import install_convolved
from vllm_steer.models.looped_layers import (
    engram_gaps,
    every_gap,
    hrm_text_gaps,
    hrm_text_runs,
    loop_coder_runs,
    solar_gaps,
)
from vllm_steer.models.recipe import BLOCK_INPUT, BLOCK_OUTPUT, MIXED_BRANCH, MLP_MIX, NO_SUBMODULE, Reasons, Recipe
from vllm_steer.points import BRANCH_OUTPUTS, OPTIONAL_POINTS, PointName

MODULES: Final = "vllm.model_executor.models."

_TWO_ATTENTIONS: Final = (
    "{layer} has two attentions and two MLPs, with a mixture of experts beside them, so no tensor holds a stream "
    "between attention and MLP; use pre_attn or post_block"
)
_MULTIPLIED: Final = (
    "{layer} multiplies the branch when it adds it, so no tensor holds what is added to the stream; use post_attn or "
    "post_block"
)
_RESCALED: Final = (
    "{layer} scales the whole stream after its MLP, so the branch's output is not the difference between the residual "
    "stream before and after it; use post_block"
)
_BFLOAT16_ONLY: Final = "{layer} computes only in bfloat16, in which this point could not be proven; use post_block"
_NORMS_SUM: Final = (
    "this {layer} normalizes the sum of stream and branch, so the branch's output is not the difference between the "
    "residual stream before and after it; use post_attn or post_block"
)
_SECOND_INPUT: Final = (
    "this {layer} scales the norm's output by a second input before the MLP reads it, so the MLP's input is not the "
    "norm's output; use post_attn"
)
_TWO_NORMS: Final = "this {layer} gives its MLP and its experts different norms of the stream; use post_attn"
_OUTER_BIAS: Final = (
    "{layer} adds the branch's bias separately, so no tensor holds what is added to the stream; use pre_attn or "
    "post_block"
)
_CHECKPOINT: Final = "config.json of the checkpoint sets it, so start this model without --enable-steering"

_MEAN: Final = "the mean"
_REDUCE: Final = "fused_allreduce_rms_norm"
_REDUCE_GEMMA: Final = "fused_allreduce_gemma_rms_norm"

_BOTH_MULTIPLIED: Final[Reasons] = {"attn_out": _MULTIPLIED, "mlp_out": _MULTIPLIED}
_MIXED: Final[Reasons] = {"attn_out": MIXED_BRANCH, "mlp_out": MIXED_BRANCH}
_POST_NORMS: Final = {"attn_out": "post_attention_layernorm", "mlp_out": "post_feedforward_layernorm"}
_NORMS_AFTER: Final = {"attn_out": "input_layernorm", "mlp_out": "post_attention_layernorm"}
_POST_NORMED: Final[Mapping[str, Any]] = {"altered": BRANCH_OUTPUTS}
"""Pairs with norms after attention and MLP."""
_SELF_ATTN: Final = {"attn_out": "self_attn", "mlp_out": "mlp"}
_SELF_ATTENTION: Final = {"attn_out": "self_attention", "mlp_out": "mlp"}


def _pair(layer: str, post_attn: str | None = "post_attention_layernorm", **more: Any) -> Recipe:
    return Recipe(MODULES + layer, "pair", post_attn, **more)


def _single(layer: str, post_attn: str | None = "post_attention_layernorm", **more: Any) -> Recipe:
    return Recipe(MODULES + layer, "single", post_attn, **more)


def _reduced(layer: str, function: str, **more: Any) -> Recipe:
    return Recipe(f"vllm.models.{layer}", "pair", reduced_by=function, **more)


def _streams(layer: str, install: Any, **more: Any) -> Recipe:
    settings: dict[str, Any] = {
        "normed": False,
        "refused_points": _MIXED,
        "mixed": True,
        "stream": _MEAN,
        "post_attn": MLP_MIX,
        **more,
    }
    return Recipe(layer, "streams", install=install, **settings)


def _derived(layer: str, base: str) -> Recipe:
    """Return the row of a class that inherits ``forward``; its other fields are the base's."""
    return Recipe(MODULES + layer, "pair", inherits=MODULES + base)


def _axk1(layer: Any) -> tuple[PointName, ...]:
    return ("mlp_out",) if getattr(layer, "is_layer_sparse", False) else ()


def _layer_scale(layer: Any) -> tuple[PointName, ...]:
    return BRANCH_OUTPUTS if getattr(layer, "layer_scale", False) else ()


def _mobius(layer: Any) -> tuple[PointName, ...]:
    """Return the branches that are scaled, and the MLP's, to which one that several layers share is added."""
    return BRANCH_OUTPUTS if getattr(layer, "layer_scale", False) else ("mlp_out",)


def _step3(layer: Any) -> tuple[PointName, ...]:
    """Return which branch is the sum of experts and a shared one."""
    return ("mlp_out",) if getattr(layer, "use_moe", False) else ()


def _deci_lm(layer: Any) -> Mapping[str, Any]:
    """Return where the stream after attention is in a block that may lack its attention or its MLP."""
    if getattr(layer, "mlp", None) is None:
        return {"post_attn": BLOCK_OUTPUT}
    return {"post_attn": BLOCK_INPUT} if getattr(layer, "self_attn", None) is None else {}


def _falcon(layer: Any) -> Mapping[str, Any]:
    parallel = layer.config.new_decoder_architecture or layer.config.parallel_attn
    refused = dict.fromkeys(("attn_out", "mlp_out"), _OUTER_BIAS) if layer.config.bias else {}
    post_attn = {} if parallel else {"post_attn": "post_attention_layernorm"}
    return {"refused_points": refused, **post_attn}


def _falcon_attention(output: Any) -> Any:
    """Return the attention branch; Falcon's attention returns its bias separately."""
    return output[0] if output[1] is None else output[0] + output[1]


def _gemma4(layer: Any) -> Mapping[str, Any]:
    return {"refused_points": {"mlp_in": _TWO_NORMS}} if layer.enable_moe_block else {}


def _mistral(layer: Any) -> Mapping[str, Any]:
    adapted = getattr(layer, "ada_rms_norm_t_cond", None) is not None
    return {"refused_points": {"mlp_in": _SECOND_INPUT}} if adapted else {}


def _olmo_hybrid(layer: Any) -> Mapping[str, Any]:
    return {} if layer.layer_type == "linear_attention" else {"post_attn": "mlp"}


def _openpangu(layer: Any) -> Mapping[str, Any]:
    return {"post_attn": "pre_mlp_layernorm", **_POST_NORMED} if layer.sandwich_norm else {}


def _opt(layer: Any) -> Mapping[str, Any]:
    if layer.do_layer_norm_before:
        return {}
    # OPT-350m normalizes the sum and keeps the result as its residual: an edit before that norm reaches both.
    return {"post_attn": "self_attn_layer_norm", "refused_points": dict.fromkeys(OPTIONAL_POINTS, _NORMS_SUM)}


def _post_norm_residual(layer: Any) -> str | None:
    if not layer.apply_residual_connection_post_layernorm:
        return None
    return f"apply_residual_connection_post_layernorm=True, which makes the normed input the residual; {_CHECKPOINT}"


def _sequence_parallel(layer: Any) -> str | None:
    for name in (
        "use_sequence_parallel_moe",
        "use_attn_reduce_scatter_for_moe",
        "use_sequence_parallel",
        "is_sequence_parallel",
        "use_hc_sequence_parallel",
    ):
        if getattr(layer, name, False):
            flags = "--enable-expert-parallel" + (" and --enable-hc-sp" if name == "use_hc_sequence_parallel" else "")
            return (
                f"{name}: each rank then holds the stream of only a part of the tokens; start it without {flags}, or "
                "with --tensor-parallel-size 1"
            )
    return None


def _scaled_in_float16(layer: Any) -> str | None:
    # The norm has the stream's dtype even if other weights are quantised.
    if layer.input_layernorm.weight.dtype is torch.float16 and layer.routed_scaling_factor not in (None, 1):
        return "dtype=float16, in which it scales the stream by 1 / routed_scaling_factor; use --dtype bfloat16"
    return _sequence_parallel(layer)


def _kimi(layer: Any) -> str | None:
    if getattr(layer, "use_attn_residuals", False):
        return (
            "attention residuals (Kimi K3), which are proven only on NVIDIA GPUs; start it there, or without "
            "--enable-steering"
        )
    return _sequence_parallel(layer)


def _kimi_k3(layer: Any) -> Mapping[str, Any]:
    if not layer.use_attn_res:
        return {}
    return {
        "shape": "streams",
        "install": streams.attention_residuals,
        "stream": "the running sum",
        "post_attn": "_post_attn_norm",
        "normed": False,
        "restarts": layer.is_block_write_layer,
        "mixed": True,
    }


def _fused_streams(layer: Any) -> str | None:
    if not layer.use_fused_mhc:
        return None
    return "hyper-connections fused by TileLang, which are not proven in this class; start it without --enable-steering"


def _no_mhc(layer: Any) -> str | None:
    return _sequence_parallel(layer) if layer.mhc else f"mhc=False, which is not proven; {_CHECKPOINT}"


def _token_embeddings(layer: Any) -> str | None:
    if layer.ple is not None:
        return f"ple_layer_ids, layers with embeddings of n-grams, which are not proven; {_CHECKPOINT}"
    return _sequence_parallel(layer)


def _delayed_mixes(layer: Any) -> str | None:
    if layer.attn.swa_cache_layer.bounded_replay:
        return (
            "swa_bounded_replay, with which prefill runs the last layers on only a part of the tokens; set "
            "swa_bounded_replay=False (--no-swa-bounded-replay)"
        )
    if layer.fuse_mhc_all_reduce:
        return (
            "an all-reduce inside the hyper-connection kernel, so no tensor holds the reduced output of a sublayer; "
            "set disable_custom_all_reduce=True (--disable-custom-all-reduce)"
        )
    return _sequence_parallel(layer)


def _single_stream(layer: Any) -> str | None:
    return None if layer.enable_ihc else f"enable_ihc=False, which is not proven; {_CHECKPOINT}"


VLLM_RECIPES: Final[tuple[Recipe, ...]] = (
    # Attention, then MLP: pairs.
    _pair("AXK1.AXK1DecoderLayer", altered_in=_axk1, why_unsupported=_scaled_in_float16),
    _pair("afmoe.AfmoeDecoderLayer", "pre_mlp_layernorm", **_POST_NORMED),
    _pair("apertus.ApertusDecoderLayer", "feedforward_layernorm"),
    _derived("aria.AriaTextDecoderLayer", "llama.LlamaDecoderLayer"),
    _pair("bailing_moe.BailingMoeBlock"),
    _pair("bailing_moe_v3.BailingMoeV3DecoderLayer"),
    _pair("deepseek_v2.DeepseekV2DecoderLayer", why_unsupported=_scaled_in_float16),
    _pair("domyn_edge.DomynEdgeDecoderLayer", "pre_feedforward_norm", **_POST_NORMED),
    _pair("ernie45_moe.Ernie4_5_MoeDecoderLayer"),
    _pair("ernie45_vl_moe.Ernie4_5_VLMoeDecoderLayer"),
    _pair("exaone.ExaoneDecoderLayer", "ln_2"),
    _pair("exaone_moe.ExaoneMoeDecoderLayer"),
    _pair("gemma.GemmaDecoderLayer"),
    _pair("gemma2.Gemma2DecoderLayer", "pre_feedforward_layernorm", **_POST_NORMED),
    _pair("gemma3.Gemma3DecoderLayer", "pre_feedforward_layernorm", **_POST_NORMED),
    _pair("glm4.Glm4DecoderLayer", **_POST_NORMED),
    _pair("glm4_moe.Glm4MoeDecoderLayer"),
    _pair("glm4_moe_lite.Glm4MoeLiteDecoderLayer"),
    _pair("gpt_oss.TransformerBlock"),
    _pair("hy_v3.HYV3DecoderLayer"),
    _pair("internlm2.InternLMDecoderLayer", "ffn_norm"),
    _pair("interns1_pro.InternS1ProMoeDecoderLayer"),
    _pair("k2_horizon.K2HorizonDecoderLayer"),
    _pair("laguna.LagunaDecoderLayer"),
    _pair("llama.LlamaDecoderLayer"),
    _pair("llama4.Llama4DecoderLayer"),
    _pair("longcat_flash.FlashDecoderLayer", None,
          refused_points=dict.fromkeys(("post_attn", *OPTIONAL_POINTS), _TWO_ATTENTIONS)),
    _pair("mimo_v2.MiMoV2FlashDecoderLayer"),
    _pair("minimax_m2.MiniMaxM2DecoderLayer"),
    _pair("mistral.MistralDecoderLayer", variant=_mistral),
    _pair("mixtral.MixtralDecoderLayer"),
    _pair("molmo.MolmoDecoderLayer"),
    _pair("molmo2.Molmo2DecoderLayer"),
    _pair("nemotron.NemotronDecoderLayer"),
    _pair("nemotron_nas.DeciLMDecoderLayer", variant=_deci_lm),
    _pair("olmoe.OlmoeDecoderLayer"),
    _pair("openpangu.OpenPanguDecoderLayer", variant=_openpangu, why_unsupported=_scaled_in_float16),
    _pair("param2moe.Param2MoEDecoderLayer"),
    _pair("plamo3.Plamo3DecoderLayer", "pre_mlp_norm", **_POST_NORMED),
    _pair("qwen2.Qwen2DecoderLayer"),
    _pair("qwen2_moe.Qwen2MoeDecoderLayer"),
    _pair("qwen3.Qwen3DecoderLayer"),
    _pair("qwen3_moe.Qwen3MoeDecoderLayer"),
    _derived("qwen3_vl.Qwen3VLDecoderLayer", "qwen3.Qwen3DecoderLayer"),
    _derived("qwen3_vl_moe.Qwen3VLMoeDecoderLayer", "qwen3_moe.Qwen3MoeDecoderLayer"),
    _pair("rnj1.Rnj1DecoderLayer", "pre_feedforward_layernorm", **_POST_NORMED),
    _pair("sarvam.SarvamMLABlock"),
    _pair("solar.SolarDecoderLayer", gaps=solar_gaps),
    _pair("step1.StepDecoderLayer"),
    _pair("step3_text.Step3TextDecoderLayer", altered_in=_step3),
    # The same, with the tensor-parallel reduction in the norms.
    _reduced("deepseek_v32.nvidia.model.DeepseekV32DecoderLayer", _REDUCE, why_unsupported=_sequence_parallel),
    _reduced("dots3_note.nvidia.model.Dots3NoteDecoderLayer", _REDUCE, why_unsupported=_sequence_parallel,
             inherits="vllm.models.deepseek_v32.nvidia.model.DeepseekV32DecoderLayer"),
    _reduced("minimax_m3.nvidia.model.MiniMaxM3DecoderLayer", _REDUCE_GEMMA),
    # Other token mixers instead of, or beside, attention: pairs.
    _pair("bailing_moe_linear.BailingMoeV25DecoderLayer", refused_points={"mlp_out": _BFLOAT16_ONLY}),
    _pair("interns2_mobius.InternS2MobiusDecoderLayer", altered_in=_mobius, why_unsupported=_sequence_parallel),
    _pair("jamba.JambaAttentionDecoderLayer", "pre_ff_layernorm"),
    _pair("jamba.JambaMambaDecoderLayer", "pre_ff_layernorm"),
    Recipe("vllm.models.kimi_k3.amd.linear.KimiDecoderLayer", "pair", why_unsupported=_kimi),
    Recipe("vllm.models.kimi_k3.nvidia.model.KimiDecoderLayer", "pair", residual_at=2, why_unsupported=_kimi,
           variant=_kimi_k3),
    _pair("lfm2.Lfm2AttentionDecoderLayer", "ffn_norm"),
    _pair("lfm2.Lfm2ShortConvDecoderLayer", "ffn_norm"),
    _pair("lfm2_moe.Lfm2MoeAttentionDecoderLayer", "ffn_norm"),
    _pair("lfm2_moe.Lfm2MoeShortConvDecoderLayer", "ffn_norm"),
    _pair("qwen3_5.Qwen3_5DecoderLayer", altered_in=_layer_scale, why_unsupported=_sequence_parallel),
    _pair("qwen3_next.Qwen3NextDecoderLayer", altered_in=_layer_scale, why_unsupported=_sequence_parallel),
    # Blocks with one branch: pairs.
    _pair("cosmos3_edge.Cosmos3EdgeAttentionDecoderLayer", BLOCK_OUTPUT),
    _pair("mamba.MambaDecoderLayer", BLOCK_OUTPUT),
    _pair("mamba2.Mamba2DecoderLayer", BLOCK_OUTPUT),
    _pair("nemotron_h.NemotronHMambaDecoderLayer", BLOCK_OUTPUT),
    _pair("nemotron_h.NemotronHAttentionDecoderLayer", BLOCK_OUTPUT),
    _pair("nemotron_h.NemotronHMLPDecoderLayer", BLOCK_INPUT),
    _pair("nemotron_h.NemotronHMoEDecoderLayer", BLOCK_INPUT),
    # Attention, then MLP: single tensors.
    _single("bloom.BloomBlock", **_SELF_ATTENTION, why_unsupported=_post_norm_residual, altered=BRANCH_OUTPUTS),
    _single("chatglm.GLMBlock", **_SELF_ATTENTION, why_unsupported=_post_norm_residual),
    _single("dbrx.DbrxBlock", "norm_attn_norm.norm_2", attn_out="norm_attn_norm.attn", mlp_out="ffn",
            inner_class="DbrxFusedNormAttention", altered=("attn_out",)),
    _single("exaone4.Exaone4DecoderLayer", "mlp", **_POST_NORMS),
    _single("gemma4.Gemma4DecoderLayer", "pre_feedforward_layernorm", attn_out="post_attention_layernorm",
            refused_points={"mlp_out": _RESCALED}, variant=_gemma4),
    _single("gpt2.GPT2Block", "ln_2", attn_out="attn", mlp_out="mlp"),
    _single("granite.GraniteDecoderLayer", refused_points=_BOTH_MULTIPLIED),
    _single("granitemoe.GraniteMoeDecoderLayer", refused_points=_BOTH_MULTIPLIED),
    _single("granitemoeshared.GraniteMoeSharedDecoderLayer", refused_points=_BOTH_MULTIPLIED),
    _single("hyperclovax.HyperCLOVAXDecoderLayer", refused_points=_BOTH_MULTIPLIED),
    _single("minicpm.MiniCPMDecoderLayer", refused_points=_BOTH_MULTIPLIED),
    _single("minicpm3.MiniCPM3DecoderLayer", refused_points=_BOTH_MULTIPLIED),
    # These keep the names of pre-norm layers: the norms follow attention and MLP.
    _single("molmo.MolmoDecoderNormAfterLayer", "mlp", **_NORMS_AFTER),
    _single("molmo2.Molmo2DecoderNormAfterLayer", "mlp", **_NORMS_AFTER),
    _single("muse_glimmer.MuseGlimmerDecoderLayer", "pre_feedforward_layernorm",
            refused_points={"mlp_in": NO_SUBMODULE}),
    _single("nemotron_parse3_5.MBartDecoderLayer", "final_layer_norm", attn_out="self_attn", mlp_out="fc2"),
    _single("opt.OPTDecoderLayer", "final_layer_norm", attn_out="self_attn", mlp_out="fc2", variant=_opt),
    _single("orion.OrionDecoderLayer", **_SELF_ATTN),
    _single("phimoe.PhiMoEDecoderLayer", attn_out="self_attn", mlp_out="block_sparse_moe"),
    _single("stablelm.StablelmDecoderLayer", **_SELF_ATTN),
    _single("step3p5.Step3p5DecoderLayer", attn_out="self_attn", mlp_out="moe|mlp"),
    # Branches are convolved over tokens before they are added.
    Recipe("vllm.models.inkling.nvidia.model.InklingDecoderLayer", "single", "mlp_norm", install=install_convolved),
    # Several streams.
    _streams(MODULES + "gemma3n.Gemma3nDecoderLayer", streams.altup, post_attn="pre_feedforward_layernorm",
             stream="the active one", gaps=every_gap),
    _streams("vllm.models.deepseek_v4.cpu.model.DeepseekV4DecoderLayer", streams.unfused,
             why_unsupported=_fused_streams),
    _streams("vllm.models.deepseek_v4.nvidia.model.DeepseekV4DecoderLayer", streams.fused_functions,
             why_unsupported=_sequence_parallel),
    _streams("vllm.models.deepseek_v41.nvidia.model.DeepseekV4DecoderLayer", streams.fused_functions,
             why_unsupported=_delayed_mixes, gaps=engram_gaps, inner_class="Engram"),
    _streams("vllm.models.glm5next.common.model.Glm5NextDecoderLayer", streams.fused_methods, normed=True,
             why_unsupported=_no_mhc),
    _streams("vllm.models.qwen4_exp.nvidia.model.Qwen4ExpDecoderLayer", streams.gated,
             why_unsupported=_token_embeddings),
    _streams("vllm.models.hy_v4.nvidia.model.HYV4DecoderLayer", streams.separate, why_unsupported=_single_stream),
    # Layers that run several times per token.
    _single("hrm_text.HrmTextDecoderLayer", **_SELF_ATTN, pass_argument="current_step", runs=hrm_text_runs,
            gaps=hrm_text_gaps),
    _single("iquest_loopcoder.LoopCoderDecoderLayer", **_SELF_ATTN, pass_argument="loop_idx", runs=loop_coder_runs,
            recalls=True),
    # Self-attention, attention to an encoder, then MLP: post_attn is in front of the second.
    _single("cohere_asr.CohereASRDecoderLayer", "layer_norm_2", attn_out="first_sub_layer", mlp_out="third_sub_layer",
            mlp_in="layer_norm_3", cross_attention=True),
    _single("nemotron_parse.MBartDecoderLayer", "encoder_attn_layer_norm", attn_out="self_attn", mlp_out="fc2",
            mlp_in="final_layer_norm", cross_attention=True),
    _single("whisper.WhisperDecoderLayer", "encoder_attn_layer_norm", attn_out="self_attn", mlp_out="mlp",
            mlp_in="final_layer_norm", cross_attention=True),
    # Other token mixers instead of, or beside, attention: single tensors.
    _single("falcon_h1.FalconH1ParallelHybrid", "pre_ff_layernorm", mlp_out="feed_forward",
            refused_points={"attn_out": _MULTIPLIED}),
    _single("granitemoehybrid.GraniteMoeHybridAttentionDecoderLayer", refused_points=_BOTH_MULTIPLIED),
    _single("granitemoehybrid.GraniteMoeHybridMambaDecoderLayer", refused_points=_BOTH_MULTIPLIED),
    _single("olmo_hybrid.OlmoHybridDecoderLayer", refused_points={"mlp_in": NO_SUBMODULE}, variant=_olmo_hybrid),
    # The shared attention and MLP of a hybrid layer are a branch of its mixer's input.
    _single("zamba2.Zamba2HybridLayer", BLOCK_OUTPUT),
    _single("zamba2.Zamba2MambaDecoderLayer", BLOCK_OUTPUT),
    # Attention and MLP in parallel.
    _single("cohere_compass.CohereCompassDecoderLayer", None, **_SELF_ATTN),
    _single("cohere2_moe.Cohere2MoeDecoderLayer", None),
    _single("commandr.CohereDecoderLayer", None, **_SELF_ATTN, partial_sums=True),
    _single("falcon.FalconDecoderLayer", None, **_SELF_ATTENTION, partial_sums=True, attn_added=_falcon_attention,
            variant=_falcon),
    _single("gpt_j.GPTJBlock", None, attn_out="attn", mlp_out="mlp"),
    _single("moondream3.Moondream3DecoderLayer", None, attn_out="attn", mlp_out="mlp"),
)  # fmt: skip
