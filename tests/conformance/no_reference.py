# SPDX-License-Identifier: Apache-2.0
"""Helper table: architectures that HF Transformers does not have; ``test_identities.py`` proves them inside vLLM.

Their config classes are remote code of the checkpoints; a plain config with the fields that vLLM's model reads replaces
them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from tests.conformance.model import (
    HIDDEN,
    LAYERS,
    MAX_POSITIONS,
    NORM_SPREAD,
    VOCAB,
    WEIGHT_STD,
    TinyModel,
)  # fmt: skip
from tests.conformance.ngrams import COMPRESSED, save_tokenizer
from tests.conformance.no_reference_wrappers import NO_REFERENCE_WRAPPERS
from tests.conformance.shapes import TEXT_ONLY

PLAIN: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
_MOE: Final[dict[str, Any]] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_shared_experts": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "head_dim": 32, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_BAILING: Final = {**_MOE, "use_bias": False, "use_qkv_bias": False, "embedding_dropout": 0.0}
_SARVAM: Final = {**_MOE, "embedding_dropout": 0.0, "routed_scaling_factor": 1.0}
_MLA: Final[dict[str, Any]] = {
    "num_key_value_heads": 2, "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
_DEEPSEEK: Final = {
    **_MOE,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0,
}
_DEEPSEEK_MLA: Final = {**_DEEPSEEK, **_MLA, "q_lora_rank": 32}
_LOCAL: Final = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
_GLM: Final[dict[str, Any]] = {
    "num_layers": LAYERS, "padded_vocab_size": VOCAB, "ffn_hidden_size": 128, "kv_channels": 32,
    "multi_query_attention": True, "multi_query_group_num": 1, "seq_length": MAX_POSITIONS, "add_qkv_bias": True,
}  # fmt: skip
_SANDWICH: Final = "post_attention_layernorm"


def _row(architecture: str, model_type: str, layer: str, recipe: str = "FUSED", **more: Any) -> TinyModel:
    settings = {name: more.pop(name) for name in list(more) if name not in TinyModel.__dataclass_fields__}
    name = more.pop("name", architecture.removesuffix("ForCausalLM").lower())
    return TinyModel(name, model_type, settings, recipe, layer, architecture=architecture, **more)


_SPARSE: Final[dict[str, Any]] = {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 128}
_KIMI: Final[dict[str, Any]] = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "mla_use_nope": True,
    "linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 2, "head_dim": 32,
                           "short_conv_kernel_size": 4},
}  # fmt: skip
_SPEECH: Final[dict[str, Any]] = {
    "d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": LAYERS, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 128, "num_mel_bins": 16,
    "max_source_positions": 16, "max_target_positions": MAX_POSITIONS, "activation_function": "gelu",
    "is_encoder_decoder": True, "decoder_start_token_id": 1,
}  # fmt: skip
_COHERE_SPEECH: Final[dict[str, Any]] = {
    "is_encoder_decoder": True, "decoder_start_token_id": 1, "num_key_value_heads": 2, "sample_rate": 16000,
    "max_audio_clip_s": 1, "preprocessor": {"features": 16, "window_size": 0.025},
    "encoder": {"subsampling_factor": 8, "n_heads": 2}, "head": {"num_classes": VOCAB, "hidden_size": HIDDEN},
    "transf_decoder": {"config_dict": {
        "hidden_size": HIDDEN, "inner_size": 128, "hidden_act": "relu", "num_attention_heads": 2, "num_layers": LAYERS,
        "max_sequence_length": MAX_POSITIONS,
    }},
}  # fmt: skip
_NO_PROFILE: Final[dict[str, Any]] = {"skip_mm_profiling": True}
_HRM: Final[dict[str, Any]] = {"pass_argument": "current_step", "head_dim": 32, "num_key_value_heads": 2}
_ATTENTION: Final = {"attention": {"no_op": False, "n_heads_in_group": 2}}
_NO_ATTENTION: Final = {"attention": {"no_op": True}}
_FFN: Final = {"ffn": {"no_op": False, "ffn_mult": 2.0}}
_NO_FFN: Final = {"ffn": {"no_op": True}}

_HYPER: Final[dict[str, Any]] = {
    **_DEEPSEEK, "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 5, "index_topk": 8, "num_hash_layers": 0,
    "moe_intermediate_size": 64, "head_dim": 32, "swiglu_limit": 10.0,
}  # fmt: skip
_ENGRAM: Final[dict[str, Any]] = {
    "engram_layer_ids": [1, 3], "engram_num_embeddings": [1000, 1000], "engram_max_ngram_size": 4, "engram_n_heads": 2,
    "engram_head_dim": 32, "engram_vocab_size": 50, "engram_compressed_vocab_size": COMPRESSED,
    "engram_pad_token_id": 0,
}  # fmt: skip
SEVERAL_STREAMS: Final = (
    _row("DeepseekV4ForCausalLM", "deepseek_v4", "DeepseekV4DecoderLayer", "HYPER-CONNECTIONS", name="deepseek_v4",
         model_class="vllm.models.deepseek_v4.nvidia.model:DeepseekV4ForCausalLM", **_HYPER),
    _row("DeepseekV4ForCausalLM", "deepseek_v4", "DeepseekV4DecoderLayer", "HYPER-CONNECTIONS", name="deepseek_v4_cpu",
         model_class="vllm.models.deepseek_v4.cpu.model:DeepseekV4ForCausalLM", **_HYPER),
    _row("DeepseekV41ForCausalLM", "deepseek_v4", "DeepseekV4DecoderLayer", "HYPER-CONNECTIONS", name="deepseek_v41",
         model_class="vllm.models.deepseek_v41.nvidia.model:DeepseekV41LLMForCausalLM", **_HYPER,
         kv_source_layer_ids=[LAYERS - 1], engine={"swa_bounded_replay": False}),
    _row("DeepseekV41ForCausalLM", "deepseek_v41", "DeepseekV4DecoderLayer", "HYPER-CONNECTIONS",
         name="deepseek_v41_engram", model_class="vllm.models.deepseek_v41.nvidia.model:DeepseekV41LLMForCausalLM",
         **_HYPER, **_ENGRAM, kv_source_layer_ids=[LAYERS - 1], gaps=(1, 3),
         engine={"swa_bounded_replay": False, "engram_config": {"cpu_offload": False}}),
    _row("HYV4ForCausalLM", "hy_v4", "HYV4DecoderLayer", "HYPER-CONNECTIONS", name="hy_v4",
         model_class="vllm.models.hy_v4.nvidia.model:HYV4ForCausalLM", **{**_DEEPSEEK, **_MLA, "q_lora_rank": 32},
         hc_mult=4, index_topk=8, indexer_types=["full"] * LAYERS, enable_lm_head_fp32=False,
         mlp_layer_types=["dense"] * LAYERS, layer_types=["full_attention"] * LAYERS),
    # Dense: its experts have no CPU kernels.
    _row("Glm5NextForCausalLM", "glm5_next_text", "Glm5NextDecoderLayer", "HYPER-CONNECTIONS", name="glm5_next",
         model_class="vllm.models.glm5next.common.model:Glm5NextForCausalLM", mhc=True, hc_mult=4, hc_eps=1e-6,
         hc_sinkhorn_iters=5, mlp_layer_types=["dense"] * LAYERS, layer_types=["full_attention"] * LAYERS,
         indexer_types=["full"] * LAYERS, index_topk=8, index_kpool=4, mla_use_nope=True,
         **{**_MLA, "q_lora_rank": 32, "qk_rope_head_dim": 0}, head_dim=32),
    _row("Qwen4ExpForCausalLM", "qwen4_exp_text", "Qwen4ExpDecoderLayer", "HYPER-CONNECTIONS", name="qwen4_exp",
         model_class="vllm.models.qwen4_exp.nvidia.model:Qwen4ExpForCausalLM", hc_count=4, hc_lowrank=12,
         layer_types=["full_attention"] * LAYERS, ple_layer_ids=[], num_experts=4, num_experts_per_tok=2,
         moe_intermediate_size=64, shared_expert_intermediate_size=64, head_dim=32,
         rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    _row("KimiLinearForCausalLM", "kimi_linear", "KimiDecoderLayer", "ATTENTION-RESIDUALS", name="kimi_k3",
         model_class="vllm.models.kimi_k3.nvidia.model:KimiLinearForCausalLM", **_KIMI, attn_res_block_size=2),
)  # fmt: skip
"""Rows with several residual streams."""

NO_REFERENCE: Final[tuple[TinyModel, ...]] = (
    _row("BailingMoeForCausalLM", "bailing_moe", "BailingMoeBlock", **_BAILING),
    _row("BailingMoeV2ForCausalLM", "bailing_moe_v2", "BailingMoeBlock", **_BAILING, use_qk_norm=True),
    _row("ChatGLMModel", "chatglm", "GLMBlock", "UNFUSED", **_GLM, original_rope=True),
    _row("ChatGLMForConditionalGeneration", "chatglm", "GLMBlock", "UNFUSED", **_GLM, original_rope=True),
    # HF has it, but vLLM 0.32 does not load the checkpoints that HF saves.
    _row("DbrxForCausalLM", "dbrx", "DbrxBlock", "UNFUSED", branch_in_vllm="norm_attn_norm.attn", d_model=HIDDEN,
         n_heads=2, n_layers=LAYERS, max_seq_len=MAX_POSITIONS,
         attn_config={"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
         ffn_config={"hidden_size": HIDDEN, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}),
    # Blocks of a searched architecture differ: groups of heads, widths, and some lack attention or MLP.
    _row("DeciLMForCausalLM", "nemotron-nas", "DeciLMDecoderLayer", name="decilm",
         block_configs=[{**_ATTENTION, **_FFN}, {"attention": {"no_op": False, "n_heads_in_group": 1}, **_FFN}] * 2),
    _row("DeciLMForCausalLM", "nemotron-nas", "DeciLMDecoderLayer", name="decilm_no_ops", mlp_blocks=(2,),
         block_configs=[{**_ATTENTION, **_FFN}, {**_ATTENTION, **_NO_FFN}, {**_NO_ATTENTION, **_FFN},
                        {**_ATTENTION, **_FFN}]),
    _row("DeepseekForCausalLM", "deepseek", "DeepseekV2DecoderLayer", **_DEEPSEEK),
    _row("DomynEdgeForCausalLM", "domyn_edge", "DomynEdgeDecoderLayer", since="0.33.0",
         branch_in_vllm="post_attention_norm", head_dim=32, per_layer_config={"2": {"head_dim": 64}},
         position_layers=["rope", "nope"] * (LAYERS // 2), window_sizes=[[8, 0], [-1, 0]] * (LAYERS // 2)),
    _row("ExaoneForCausalLM", "exaone", "ExaoneDecoderLayer", activation_function="silu", layer_norm_epsilon=1e-5),
    _row("InternLM2ForCausalLM", "internlm2", "InternLMDecoderLayer"),
    _row("K2HorizonForCausalLM", "k2_horizon", "K2HorizonDecoderLayer", **{**_MOE, "head_dim": 32}, rope_head_dim=32,
         attention_bias=False, attention_gate_func=None, decoder_sparse_step=1, mlp_only_layers=[0],
         layernorm_num_groups=1, moe_gate_bias=False, mova_num_experts=0, mova_num_experts_per_tok=0,
         query_key_norm=True, router_scaling_factor=1.0, router_score_func="softmax"),
    _row("MiniCPMForCausalLM", "minicpm", "MiniCPMDecoderLayer", "UNFUSED*MULT", multiplier=0.7,
         scale_depth=1.4, scale_emb=2.0, dim_model_base=64, num_experts=0),
    _row("MiMoForCausalLM", "mimo", "Qwen2DecoderLayer"),
    # HF has it, but names the weights differently.
    _row("OlmoHybridForCausalLM", "olmo_hybrid", "OlmoHybridDecoderLayer", "UNFUSED", name="olmo_hybrid",
         head_dim=32,
         branch_in_vllm="linear_attn|post_attention_layernorm", gpu_only=True,
         linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=128, linear_value_head_dim=128,
         linear_conv_kernel_dim=4, attention_bias=False,
         layer_types=["linear_attention", "full_attention"] * (LAYERS // 2)),
    _row("OrionForCausalLM", "orion", "OrionDecoderLayer", "UNFUSED"),
    _row("PanguEmbeddedForCausalLM", "PanguEmbedded", "OpenPanguDecoderLayer"),
    _row("PanguUltraMoEForCausalLM", "pangu_ultra_moe", "OpenPanguDecoderLayer", **_DEEPSEEK_MLA,
         sandwich_norm=True, branch_in_vllm=_SANDWICH),
    _row("PanguProMoEV2ForCausalLM", "PanguProMoE", "OpenPanguDecoderLayer", **_DEEPSEEK, sandwich_norm=True,
         branch_in_vllm=_SANDWICH),
    _row("Param2MoEForCausalLM", "param2moe", "Param2MoEDecoderLayer", **_MOE),
    _row("PhiMoEForCausalLM", "phimoe", "PhiMoEDecoderLayer", "UNFUSED", num_local_experts=4, num_experts_per_tok=2,
         rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    _row("Plamo3ForCausalLM", "plamo3", "Plamo3DecoderLayer", branch_in_vllm="post_mixer_norm", **_LOCAL, head_dim=32,
         rope_local_theta=10000.0, interleaved_sliding_window=[8, None] * 2),
    # Its chunked layers need a GPU; the blocks are the same.
    _row("Rnj1ForCausalLM", "rnj1", "Rnj1DecoderLayer", branch_in_vllm=_SANDWICH, head_dim=32, sliding_window=8,
         layer_types=["full_attention"] * LAYERS, attention_bias=False, final_logit_softcapping=None,
         hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=32,
         rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    _row("SarvamMoEForCausalLM", "sarvam_moe", "BailingMoeBlock", **_SARVAM, use_bias=False, use_qkv_bias=False),
    _row("SarvamMLAForCausalLM", "sarvam_mla", "SarvamMLABlock", **{**_SARVAM, **_MLA, "head_dim": 576},
         rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    _row("Step1ForCausalLM", "step1", "StepDecoderLayer", num_attention_groups=1),
    _row("Step3TextForCausalLM", "step3_text", "Step3TextDecoderLayer", num_attention_groups=1, moe_num_experts=4,
         moe_top_k=2, moe_intermediate_size=64, share_expert_dim=64, share_q_dim=64, head_dim=32,
         max_position_embedding=MAX_POSITIONS, moe_layers_enum="1,2,3",
         rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    _row("Step3p5ForCausalLM", "step3p5", "Step3p5DecoderLayer", "UNFUSED", num_attention_groups=1, moe_num_experts=4,
         moe_top_k=2, moe_intermediate_size=64, share_expert_dim=64, head_dim=32, moe_layers_enum="1,2,3",
         **_LOCAL, partial_rotary_factors=[1.0] * LAYERS, use_rope_layers=[True] * LAYERS, rope_theta=10000.0,
         attention_other_setting={"attention_type": "sliding_attention", "num_attention_heads": 2,
                                  "num_attention_groups": 1, "head_dim": 32}),
    _row("TeleChat2ForCausalLM", "telechat", "LlamaDecoderLayer", n_head=2, n_layer=LAYERS, ffn_hidden_size=128,
         layer_norm_epsilon=1e-5, attention_bias=False, mlp_bias=False),
    _row("TeleFLMForCausalLM", "TeleFLM", "LlamaDecoderLayer", use_mup=True, output_mult=1.0, mup_scale_factor=1.0,
         input_mult=1.0),
    _row("MuseGlimmerForCausalLM", "muse_glimmer_text", "MuseGlimmerDecoderLayer", "UNFUSED+POSTNORM",
         branch_in_vllm=_SANDWICH, **_LOCAL, head_dim=32, qk_scale_factor=1.0),
    _row("BailingMoeV2_5ForCausalLM", "bailing_hybrid", "BailingMoeV25DecoderLayer",
         **{**_BAILING, **_MLA, "q_lora_rank": 32, "head_dim": 64}, layer_group_size=2, group_norm_size=1,
         num_nextn_predict_layers=0, partial_rotary_factor=1.0, gpu_only=True,
         branch_in_vllm="self_attn"),
    _row("MistralLarge3ForCausalLM", "deepseek_v3", "DeepseekV2DecoderLayer", **_DEEPSEEK_MLA),
    # Blocks read a mixture of the stream and an earlier one. With 48 layers, real checkpoints have four of these.
    _row("SolarForCausalLM", "solar", "SolarDecoderLayer", bskcn_1=[1], bskcn_2=[1], bskcn_3=[3], bskcn_4=[3],
         bskcn_tv=[0.9, 0.8], gaps=(3,), forks=(1,)),
    # Looped: two passes over two layers; a low and a high stack, each of which runs twice; stacks of two layers.
    _row("IQuestLoopCoderForCausalLM", "iquest_loopcoder", "LoopCoderDecoderLayer", "UNFUSED",
         num_hidden_layers=LAYERS // 2, loop_num=2, loop_window_size=8, pass_argument="loop_idx"),
    _row("HrmTextForCausalLM", "hrm_text", "HrmTextDecoderLayer", "UNFUSED", **_HRM, num_layers_per_stack=1,
         H_cycles=2, L_cycles=1, gaps=(1, 2, 3)),
    _row("HrmTextForCausalLM", "hrm_text", "HrmTextDecoderLayer", "UNFUSED", **_HRM, name="hrmtext_stacks",
         num_layers_per_stack=2, H_cycles=1, L_cycles=1, gaps=(2,)),
    # The decoder of an encoder-decoder; the encoder has another number of layers.
    _row("WhisperForConditionalGeneration", "whisper", "WhisperDecoderLayer", "UNFUSED", name="whisper",
         **_SPEECH, cross="encoder_attn", engine=_NO_PROFILE,
         model_class="vllm.model_executor.models.whisper:WhisperForConditionalGeneration"),
    _row("CohereAsrForConditionalGeneration", "cohere_asr", "CohereASRDecoderLayer", "UNFUSED", name="cohere_asr",
         branch_in_vllm="first_sub_layer", cross="second_sub_layer", engine=_NO_PROFILE, **_COHERE_SPEECH,
         model_class="vllm.model_executor.models.cohere_asr:CohereAsrForConditionalGeneration"),
    _row("NemotronParseForConditionalGeneration", "nemotron_parse", "MBartDecoderLayer", "UNFUSED",
         name="nemotron_parse", cross="encoder_attn", engine=_NO_PROFILE, is_encoder_decoder=True,
         image_size=[64, 64], encoder={"patch_size": 16}, decoder={**PLAIN, **_SPEECH, "scale_embedding": True},
         model_class="vllm.model_executor.models.nemotron_parse:NemotronParseForConditionalGeneration"),
    _row("RadioMBartPrefixForCausalLM", "nemotron_parse", "MBartDecoderLayer", "UNFUSED", name="nemotron_parse3_5",
         since="0.33.0", engine=TEXT_ONLY, navit_packing=True, image_size=[64, 64], encoder={"patch_size": 16},
         decoder={**PLAIN, **_SPEECH, "scale_embedding": True, "is_encoder_decoder": False, "num_hidden_layers": 2,
                  "add_cross_attention": False, "causal_vision_prefix": True},
         model_class="vllm.model_executor.models.nemotron_parse3_5:RadioMBartPrefixForCausalLM"),
    # The classes for NVIDIA's GPUs; on a CPU, vLLM runs DeepSeek V2's.
    _row("DeepseekV32ForCausalLM", "deepseek_v32", "DeepseekV32DecoderLayer", name="deepseek_v32",
         model_class="vllm.models.deepseek_v32.nvidia.model:DeepseekV32ForCausalLM", **_DEEPSEEK_MLA, **_SPARSE),
    _row("GlmMoeDsaForCausalLM", "glm_moe_dsa", "DeepseekV32DecoderLayer", name="glm_moe_dsa",
         model_class="vllm.models.deepseek_v32.nvidia.model:DeepseekV32ForCausalLM", **_DEEPSEEK_MLA, **_SPARSE),
    # Dense, since its experts' activation has no CPU kernel.
    _row("MiniMaxM3SparseForCausalLM", "minimax_m3_text", "MiniMaxM3DecoderLayer", name="minimax_m3",
         model_class="vllm.models.minimax_m3.nvidia.model:MiniMaxM3SparseForCausalLM", hidden_act="swigluoai",
         swiglu_limit=7.0, swiglu_alpha=1.702, swiglu_beta=1.0, use_gemma_norm=True,
         dense_intermediate_size=128, moe_layer_freq=[0] * LAYERS, head_dim=32,
         sparse_attention_config={"sparse_attention_freq": [0, 1] * (LAYERS // 2), "sparse_num_index_heads": 1,
                                  "sparse_topk_blocks": 2}),
    _row("KimiLinearForCausalLM", "kimi_linear", "KimiDecoderLayer", name="kimi_linear",
         model_class="vllm.models.kimi_k3.nvidia.model:KimiLinearForCausalLM", **_KIMI),
    _row("BailingMoeV3ForCausalLM", "bailing_hybrid", "BailingMoeV3DecoderLayer", name="bailing_moe_v3",
         model_class="vllm.model_executor.models.bailing_moe_v3:BailingMoeV3ForCausalLM",
         **{**_BAILING, **_MLA, "q_lora_rank": 32}, layer_group_size=2, moe_shared_expert_intermediate_size=64,
         short_conv_kernel_size=4, no_kda_lora=True, routed_scaling_factor=2.0, is_scale_e=False),
    # Dense: its experts have no CPU kernels.
    _row("InklingForCausalLM", "inkling_model", "InklingDecoderLayer", "CONVOLVED", name="inkling",
         model_class="vllm.models.inkling.nvidia.model:InklingForCausalLM", head_dim=32, num_key_value_heads=2,
         dense_mlp_idx=LAYERS, use_embed_norm=True, local_layer_ids=[0, 2], sliding_window_size=8, d_rel=4,
         rel_extent=16, sconv_kernel_size=4, engine={"tokenizer_mode": "hf"}),
    # The language model of a wrapper.
    _row("CohereCompassForCausalLM", "cohere_compass_text", "CohereCompassDecoderLayer", "PARALLEL",
         name="cohere_compass", refused=("post_attn",), layer_norm_eps=1e-5, logit_scale=0.25, head_dim=32,
         model_class="vllm.model_executor.models.cohere_compass:CohereCompassForCausalLM", tie_word_embeddings=True,
         attention_bias=False, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
         rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}),
    *SEVERAL_STREAMS,
    *NO_REFERENCE_WRAPPERS,
)  # fmt: skip


def save_config(tiny: TinyModel, folder: Path) -> Path:
    """Save the row's config.json only, since the weights are dummies."""
    path = folder / tiny.name
    path.mkdir(parents=True, exist_ok=True)
    config = {**PLAIN, **tiny.settings, "model_type": tiny.config, "architectures": [tiny.architecture]}
    (path / "config.json").write_text(json.dumps(config))
    if tiny.cross is not None:
        _save_speech_processor(path)
    if "engram_layer_ids" in tiny.settings:
        save_tokenizer(path)
    return path


def _save_speech_processor(path: Path) -> None:
    """Save the tokenizer and the feature extractor that vLLM wants of an encoder-decoder, although no sound comes."""
    from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer

    names = ["<|endoftext|>", "<|startoftranscript|>", *(f"t{number}" for number in range(VOCAB - 2))]
    tokenizer = WhisperTokenizer(vocab={name: number for number, name in enumerate(names)}, merges=[])
    WhisperProcessor(WhisperFeatureExtractor(feature_size=16, chunk_length=1), tokenizer).save_pretrained(path)


_PARTS: Final = ("text_config", "vision_config", "vit_config", "adapter_config", "encoder", "decoder")
"""Fields that are configs of their own."""


class _Fields(dict[str, Any]):
    """A dict whose entries are attributes too, like the dataclasses in a remote config."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _config_class(model_type: str) -> type[Any]:
    """Return a config class; parts become configs of their own and ``x_configs`` objects with attributes."""
    from transformers import PretrainedConfig

    def init(self: Any, **fields: Any) -> None:
        for name, value in fields.items():
            if name in _PARTS and isinstance(value, dict):
                setattr(self, name, PretrainedConfig(**value))
            elif name.endswith("_configs"):
                setattr(self, name, [_Fields({part: _Fields(of) for part, of in each.items()}) for each in value])
        PretrainedConfig.__init__(self, **{name: value for name, value in fields.items() if name not in vars(self)})

    return type(model_type, (PretrainedConfig,), {"model_type": model_type, "__init__": init})


def register_config(model_type: str) -> type[Any] | None:
    """Register and return a config class for a model type that neither Transformers nor vLLM has, otherwise None."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    if model_type in CONFIG_MAPPING or model_type in _CONFIG_REGISTRY:
        return None
    made = _config_class(model_type)
    AutoConfig.register(model_type, made)
    return made


@contextmanager
def random_weights(tiny: TinyModel) -> Iterator[dict[str, Any]]:
    """Yield engine settings for random weights; vLLM's dummy weights are too small for a block to change the stream."""
    from vllm.model_executor.model_loader import dummy_loader

    register_config(tiny.config)
    generator = torch.Generator().manual_seed(zlib.crc32(tiny.name.encode()))

    @torch.no_grad()
    def fill(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if not tensor.is_floating_point():
            return
        noise = torch.randn(tensor.shape, generator=generator)
        values = WEIGHT_STD * noise if tensor.ndim > 1 else 1.0 + NORM_SPREAD * noise.clamp(-1.0, 1.0)
        tensor.copy_(values.bfloat16())

    original = dummy_loader.initialize_single_dummy_weight
    dummy_loader.initialize_single_dummy_weight = fill
    try:
        yield {"load_format": "dummy", "enable_prefix_caching": False}
    finally:
        dummy_loader.initialize_single_dummy_weight = original
