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
    _row("DeepseekForCausalLM", "deepseek", "DeepseekV2DecoderLayer", **_DEEPSEEK),
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
)  # fmt: skip


def save_config(tiny: TinyModel, folder: Path) -> Path:
    """Save the row's config.json only, since the weights are dummies."""
    path = folder / tiny.name
    path.mkdir(parents=True, exist_ok=True)
    config = {**PLAIN, **tiny.settings, "model_type": tiny.config, "architectures": [tiny.architecture]}
    (path / "config.json").write_text(json.dumps(config))
    return path


@contextmanager
def random_weights(tiny: TinyModel) -> Iterator[dict[str, Any]]:
    """Yield engine settings for random weights; vLLM's dummy weights are too small for a block to change the stream."""
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    if tiny.config not in CONFIG_MAPPING and tiny.config not in _CONFIG_REGISTRY:
        AutoConfig.register(tiny.config, type(tiny.config, (PretrainedConfig,), {"model_type": tiny.config}))
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
