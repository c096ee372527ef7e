# SPDX-License-Identifier: Apache-2.0
"""Settings of released checkpoints that shrunk configs do not have by themselves, at least one row per family.

Tied embeddings, scaled rotary positions, windows and rotary positions in some layers only, first dense layers, shared
experts, groups of experts, attention sinks, biases and multipliers. Rows have names of the checkpoints.
"""

from __future__ import annotations

from typing import Final

from tests.conformance.model import DEFAULT, MAX_POSITIONS, TinyModel
from tests.conformance.shapes import (
    EXPERTS,
    FALCON,
    FALCON_AT,
    GPT,
    GQA,
    LOCAL,
    LOCAL_EXPERTS,
    MLA,
    MQA,
    NATIVE,
    OPT,
    PARALLEL,
    SANDWICH,
    SOFT_CAPS,
)

TIED: Final = {"tie_word_embeddings": True}
ORIGINAL: Final = MAX_POSITIONS // 4
"""Length for which the rotary positions were made before they were scaled; prompts are as long as that."""
LLAMA3: Final = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
                 "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}  # fmt: skip
YARN: Final = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
               "original_max_position_embeddings": ORIGINAL}  # fmt: skip

# fmt: off
SETTINGS: Final[tuple[TinyModel, ...]] = (
    TinyModel("llama_3_2", "LlamaConfig", {**GQA, **TIED, "rope_parameters": LLAMA3}, "FUSED", "LlamaDecoderLayer"),
    TinyModel("llama_biases", "LlamaConfig", {**GQA, "attention_bias": True, "mlp_bias": True}, "FUSED",
              "LlamaDecoderLayer"),
    TinyModel("mistral_7b_v0_1", "MistralConfig", {**GQA, "sliding_window": 8}, "FUSED", "MistralDecoderLayer"),
    TinyModel("qwen2_5_0_5b", "Qwen2Config", {**MQA, **TIED, "rope_parameters": YARN}, "FUSED", "Qwen2DecoderLayer"),
    TinyModel("qwen3_0_6b", "Qwen3Config", {**GQA, **TIED, "head_dim": 64}, "FUSED", "Qwen3DecoderLayer"),
    TinyModel("phi_4_mini", "Phi3Config", {**GQA, **TIED, "head_dim": DEFAULT, "num_attention_heads": 2,
              "num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0,
              "partial_rotary_factor": 0.75}, "sliding_window": 8}, "FUSED", "LlamaDecoderLayer"),
    TinyModel("gemma_3_1b", "Gemma3TextConfig", {**GQA, **TIED, "sliding_window": 8, "query_pre_attn_scalar": 32,
              "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, "FUSED", "Gemma3DecoderLayer",
              **SANDWICH),
    TinyModel("gemma_2_2b", "Gemma2Config", {**GQA, **LOCAL, **TIED, "query_pre_attn_scalar": 16,
              "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}, "FUSED", "Gemma2DecoderLayer",
              **SANDWICH, **SOFT_CAPS),
    TinyModel("qwen1_5_moe", "Qwen2MoeConfig", {**MQA, **EXPERTS, "shared_expert_intermediate_size": 192,
              "mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": True}, "FUSED",
              "Qwen2MoeDecoderLayer"),
    TinyModel("qwen3_moe_dense", "Qwen3MoeConfig", {**GQA, **EXPERTS, "mlp_only_layers": [0, 3],
              "norm_topk_prob": True}, "FUSED", "Qwen3MoeDecoderLayer"),
    TinyModel("mixtral_window", "MixtralConfig", {**GQA, **LOCAL_EXPERTS, "sliding_window": 8, **TIED}, "FUSED",
              "MixtralDecoderLayer"),
    TinyModel("deepseek_v2_lite", "DeepseekV2Config", {**MLA, "q_lora_rank": None, "n_group": 1, "topk_group": 1,
              "n_shared_experts": 2, "norm_topk_prob": False}, "FUSED",
              "DeepseekV2DecoderLayer", **NATIVE),
    TinyModel("deepseek_r1", "DeepseekV3Config", {**MLA, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
              "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
              "first_k_dense_replace": 3, "norm_topk_prob": True}, "FUSED", "DeepseekV2DecoderLayer", **NATIVE),
    TinyModel("glm_4_5_air", "Glm4MoeConfig", {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
              "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 2, "n_shared_experts": 2,
              "routed_scaling_factor": 1.5}, "FUSED", "Glm4MoeDecoderLayer"),
    TinyModel("gpt_oss_20b", "GptOssConfig", {"sliding_window": 4, "head_dim": 64, "layer_types":
              ["sliding_attention", "full_attention"] * 2, "rope_parameters": {**YARN, "truncate": False}}, "FUSED",
              "TransformerBlock"),
    TinyModel("exaone_4_0_32b", "Exaone4Config", {**MQA, "sliding_window": 8,
              "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, "UNFUSED+POSTNORM",
              "Exaone4DecoderLayer", branch="post_attention_layernorm", reads_mid="mlp"),
    TinyModel("gpt2_untied", "GPT2Config", {**GPT, "n_inner": 96, "tie_word_embeddings": False}, "UNFUSED",
              "GPT2Block", blocks="transformer.h", branch="attn", reads_mid="ln_2"),
    TinyModel("opt_untied", "OPTConfig", {**OPT, "tie_word_embeddings": False, "enable_bias": False}, "UNFUSED",
              "OPTDecoderLayer", blocks="model.decoder.layers", reads_mid="final_layer_norm"),
    TinyModel("stablelm_2", "StableLmConfig", {**MQA, "use_qkv_bias": False, **TIED}, "UNFUSED",
              "StablelmDecoderLayer"),
    TinyModel("granite_3_1", "GraniteConfig", {**MQA, **TIED, "embedding_multiplier": 12.0,
              "residual_multiplier": 0.22, "attention_multiplier": 0.0156, "logits_scaling": 8.0}, "UNFUSED*MULT",
              "GraniteDecoderLayer", multiplier="residual_multiplier"),
    TinyModel("falcon_40b", "FalconConfig", {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True,
              "bias": False, **TIED}, "PARALLEL", "FalconDecoderLayer", **FALCON_AT, **PARALLEL),
    TinyModel("command_r_plus", "CohereConfig", {**MQA, **TIED, "logit_scale": 0.833, "use_qk_norm": True}, "PARALLEL",
              "CohereDecoderLayer", **PARALLEL),
    TinyModel("gptj_partial_rotary", "GPTJConfig", {**GPT, "rotary_dim": 8, "n_inner": 96}, "PARALLEL", "GPTJBlock",
              blocks="transformer.h", branch="attn", **PARALLEL),
)
# fmt: on
