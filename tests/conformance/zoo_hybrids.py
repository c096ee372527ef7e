# SPDX-License-Identifier: Apache-2.0
"""Decoders with token mixers other than attention: state spaces, linear attention, convolutions."""

from __future__ import annotations

from typing import Final

from tests.conformance.model import HIDDEN, LAYERS, TinyModel
from tests.conformance.shapes import (
    BFLOAT16,
    GDN,
    MAMBA2,
    MULTIPLIERS,
    NATIVE,
    ONE_BRANCH,
)  # fmt: skip

NEMOTRON_H: Final = "NemotronHAttentionDecoderLayer+NemotronHMLPDecoderLayer+NemotronHMambaDecoderLayer"

# fmt: off
HYBRIDS: Final[tuple[TinyModel, ...]] = (
    TinyModel("falcon_mamba", "FalconMambaConfig", {"state_size": 16}, "FUSED-SINGLE", "MambaDecoderLayer",
              blocks="backbone.layers", branch="mixer", **ONE_BRANCH),
    TinyModel("falcon_h1", "FalconH1Config", {**MAMBA2, "mamba_d_ssm": 128, "num_attention_heads": 2,
              "num_key_value_heads": 1}, "UNFUSED", "FalconH1ParallelHybrid", branch="mamba+self_attn",
              reads_mid="pre_ff_layernorm"),
    TinyModel("qwen3_next", "Qwen3NextConfig", GDN, "FUSED", "Qwen3NextDecoderLayer",
              branch="linear_attn|self_attn", **BFLOAT16),
    TinyModel("qwen3_5", "Qwen3_5TextConfig", GDN, "FUSED", "Qwen3_5DecoderLayer", branch="linear_attn|self_attn",
              **BFLOAT16),
    TinyModel("qwen3_5_moe", "Qwen3_5MoeTextConfig", GDN, "FUSED", "Qwen3_5DecoderLayer",
              branch="linear_attn|self_attn", **BFLOAT16),
    TinyModel("granitemoehybrid", "GraniteMoeHybridConfig", {**MULTIPLIERS, **MAMBA2,
              "shared_intermediate_size": 64, "layer_types": ["mamba", "attention"] * (LAYERS // 2)},
              "UNFUSED*MULT", "GraniteMoeHybridAttentionDecoderLayer+GraniteMoeHybridMambaDecoderLayer",
              branch="self_attn|mamba", multiplier="residual_multiplier"),
    TinyModel("jamba", "JambaConfig", {"mamba_d_state": 16, "mamba_expand": 2, "attn_layer_period": 2,
              "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
              "use_mamba_kernels": False}, "FUSED", "JambaAttentionDecoderLayer+JambaMambaDecoderLayer",
              branch="self_attn|mamba", reads_mid="pre_ff_layernorm", branch_in_vllm="mamba|o_proj"),
    TinyModel("lfm2", "Lfm2Config", {"conv_dim": HIDDEN, "conv_dim_out": HIDDEN, "block_dim": HIDDEN,
              "block_ff_dim": 128, "block_auto_adjust_ff_dim": False, "layer_types": ["conv",
              "full_attention"] * (LAYERS // 2)}, "FUSED", "Lfm2AttentionDecoderLayer+Lfm2ShortConvDecoderLayer",
              branch="self_attn|conv", reads_mid="ffn_norm", **NATIVE),
    TinyModel("lfm2_moe", "Lfm2MoeConfig", {"layer_types": ["conv", "full_attention"] * (LAYERS // 2),
              "num_dense_layers": 1}, "FUSED", "Lfm2MoeAttentionDecoderLayer+Lfm2MoeShortConvDecoderLayer",
              branch="self_attn|conv", reads_mid="ffn_norm", **NATIVE),
    TinyModel("mamba", "MambaConfig", {"state_size": 16}, "FUSED-SINGLE", "MambaDecoderLayer",
              blocks="backbone.layers", branch="mixer", **ONE_BRANCH),
    TinyModel("mamba2", "Mamba2Config", {"state_size": 16, "num_heads": 4, "n_groups": 1}, "FUSED-SINGLE",
              "Mamba2DecoderLayer", blocks="backbone.layers", branch="mixer", **ONE_BRANCH),
    TinyModel("nemotron_h", "NemotronHConfig", {"layers_block_type": ["mamba", "mlp", "attention", "mlp"],
              "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1,
              "moe_shared_expert_intermediate_size": 64}, "FUSED-SINGLE",
              NEMOTRON_H, branch="mixer",
              mlp_blocks=(1, 3), **ONE_BRANCH),
    TinyModel("nemotron_h_moe", "NemotronHConfig", {"layers_block_type": ["mamba", "moe", "attention", "mlp"],
              "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1,
              "moe_shared_expert_intermediate_size": 64}, "FUSED-SINGLE",
              NEMOTRON_H + "+NemotronHMoEDecoderLayer", branch="mixer", mlp_blocks=(1, 3), **ONE_BRANCH, gpu_only=True),
    TinyModel("nemotron_h_puzzle", "NemotronHConfig", {"layers_block_type": ["mamba", "mlp", "attention", "mlp"],
              "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1,
              "moe_shared_expert_intermediate_size": 64}, "FUSED-SINGLE", NEMOTRON_H, branch="mixer",
              mlp_blocks=(1, 3), **ONE_BRANCH, architecture="NemotronHPuzzleForCausalLM"),
    TinyModel("zamba2", "Zamba2Config", {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
              "mamba_d_state": 16, "n_mamba_heads": 4, "num_mem_blocks": 1, "num_attention_heads": 4,
              "num_key_value_heads": 4, "intermediate_size": 128, "use_mamba_kernels": False, "adapter_rank": 16,
              "use_mem_rope": True}, "UNFUSED", "Zamba2HybridLayer+Zamba2MambaDecoderLayer",
              branch="mamba|mamba_decoder.mamba", **ONE_BRANCH,
              no_parity="another order of the sums in its state space changes log-probabilities by 2e-4"),
)
# fmt: on
