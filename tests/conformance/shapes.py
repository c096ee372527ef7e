# SPDX-License-Identifier: Apache-2.0
"""Settings shared by rows of the zoo."""

from __future__ import annotations

from typing import Any, Final

from tests.conformance.model import DEFAULT, HIDDEN, LAYERS, MAX_POSITIONS

# Two heads of 32: the smallest head that vLLM's CPU attention supports.
WIDTHS: Final = {"hidden_size": HIDDEN, "num_attention_heads": 2, "num_hidden_layers": LAYERS}
BASE: Final = {**WIDTHS, "intermediate_size": 128}
MQA: Final = {**BASE, "num_key_value_heads": 1}
GQA: Final = {**BASE, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
GPT: Final = {"n_embd": HIDDEN, "n_head": 2, "n_layer": LAYERS, "n_positions": MAX_POSITIONS}
OPT: Final = {**WIDTHS, "ffn_dim": 128, "word_embed_proj_dim": HIDDEN}
FALCON: Final = {**WIDTHS, "ffn_hidden_size": 256, "bias": True}
FULL: Final = {"sliding_window": None}
# Half of the layers see only eight positions, so that local and global attention both matter.
LOCAL: Final = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
# In vLLM, Cohere 2's window is one position longer than in HF, so the window here exceeds any test sequence. Its local
# layers still differ from the global ones: only they have rotary positions.
COHERE2: Final = {**LOCAL, "sliding_window": MAX_POSITIONS, "head_dim": 32}
GEMMA: Final = {**GQA, **LOCAL, "query_pre_attn_scalar": 32}
EXAONE: Final = {**MQA, **FULL, "layer_types": ["full_attention"] * LAYERS}
EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL_EXPERTS: Final = {"num_local_experts": 4, "num_experts_per_tok": 2}
MULTIPLIERS: Final = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.15}

PARALLEL: Final[dict[str, Any]] = {"reads_mid": None, "refused": ("post_attn",)}
SANDWICH: Final[dict[str, Any]] = {
    "branch": "post_attention_layernorm",
    "reads_mid": "pre_feedforward_layernorm",
}
# HF's default attention omits soft capping.
SOFT_CAPS: Final[dict[str, Any]] = {"attention": "eager"}
POST_NORM: Final[dict[str, Any]] = {"branch": "post_attention_layernorm", "reads_mid": "mlp"}
FALCON_AT: Final[dict[str, Any]] = {"blocks": "transformer.h", "branch": "self_attention"}
NEOX_AT: Final[dict[str, Any]] = {"blocks": "gpt_neox.layers", "branch": "attention"}
MLA: Final = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "head_dim": DEFAULT,
}
MAMBA2: Final = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2}
GDN: Final = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
}
BFLOAT16: Final[dict[str, Any]] = {
    "dtype": "bfloat16",
    "no_parity": "its CPU kernels support only bfloat16, which rounds by more than the tolerance",
}
# vLLM's CPU RMSNorm kernel assumes that rows are contiguous; for a slice of a wider tensor all but the first row come
# out wrong. A compiled engine does not use it, and neither do these rows.
NATIVE: Final[dict[str, Any]] = {"engine": {"compilation_config": {"custom_ops": ["none"]}}}
ONE_BRANCH: Final[dict[str, Any]] = {"reads_mid": None, "one_branch": True}
TEXT_ONLY: Final[dict[str, Any]] = {"language_model_only": True}
"""Engine settings of multimodal models: their towers are not built."""
