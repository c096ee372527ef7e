# SPDX-License-Identifier: Apache-2.0
"""Helper table: multimodal models that HF Transformers does not have; ``test_identities.py`` proves their decoders."""

from __future__ import annotations

from typing import Any, Final

from tests.conformance.model import HIDDEN, LAYERS, MAX_POSITIONS, VOCAB, TinyModel
from tests.conformance.shapes import BFLOAT16, GDN, TEXT_ONLY

_ROPE: Final[dict[str, Any]] = {"rope_type": "default", "rope_theta": 10000.0}
_AXES: Final[dict[str, Any]] = {**_ROPE, "mrope_section": [4, 6, 6]}
_TEXT: Final[dict[str, Any]] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 128, "max_position_embeddings": MAX_POSITIONS, "head_dim": 32,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "rope_parameters": _ROPE,
}  # fmt: skip
_MOLMO: Final[dict[str, Any]] = {
    "layer_norm_type": "rms", "layer_norm_eps": 1e-5, "qkv_bias": True, "attention_layer_norm": True,
    "embedding_size": VOCAB, "weight_tying": False, "rope_parameters": _ROPE,
}  # fmt: skip
_MOLMO2: Final[dict[str, Any]] = {
    **_TEXT, "additional_vocab_size": 8, "qkv_bias": True, "rope_theta": 10000.0, "use_qk_norm": True,
    "qk_norm_type": "qwen3", "layer_norm_eps": 1e-5, "rope_scaling_layers": None,
}  # fmt: skip
_MOLMO2_TOWER: Final[dict[str, Any]] = {
    "vit_config": {
        "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
        "image_default_input_size": [28, 28], "image_patch_size": 14, "image_num_pos": 5,
    },
    "adapter_config": {
        "vit_layers": [-1, -2], "pooling_attention_mask": False, "hidden_size": HIDDEN, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu", "intermediate_size": 64,
        "text_hidden_size": HIDDEN,
    },
    "image_patch_id": 120,
}  # fmt: skip
_VISION: Final[dict[str, Any]] = {
    "depth": 2, "hidden_size": HIDDEN, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 64, "num_heads": 2,
    "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
_IMAGE_TOKENS: Final = {
    "image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123,
}  # fmt: skip
_AFTER: Final[dict[str, Any]] = {"recipe": "UNFUSED+POSTNORM", "branch_in_vllm": "input_layernorm"}


def _row(name: str, architecture: str, model_type: str, layer: str, settings: dict[str, Any], **more: Any) -> TinyModel:
    more = {"recipe": "FUSED", "engine": TEXT_ONLY, **more}
    return TinyModel(name, model_type, settings, layer=layer, architecture=architecture, **more)


NO_REFERENCE_WRAPPERS: Final[tuple[TinyModel, ...]] = (
    _row("molmo", "MolmoForCausalLM", "molmo", "MolmoDecoderLayer", {**_MOLMO, "norm_after": False}),
    _row("molmo_after", "MolmoForCausalLM", "molmo", "MolmoDecoderNormAfterLayer", {**_MOLMO, "norm_after": True},
         **_AFTER),
    _row("molmo2", "Molmo2ForConditionalGeneration", "molmo2", "Molmo2DecoderLayer",
         {"text_config": {**_MOLMO2, "norm_after": False}, **_MOLMO2_TOWER}),
    _row("molmo2_after", "Molmo2ForConditionalGeneration", "molmo2", "Molmo2DecoderNormAfterLayer",
         {"text_config": {**_MOLMO2, "norm_after": True}, **_MOLMO2_TOWER}, **_AFTER),
    _row("interns1_pro", "InternS1ProForConditionalGeneration", "interns1_pro", "InternS1ProMoeDecoderLayer",
         {"text_config": {
             **_TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
             "decoder_sparse_step": 1, "mlp_only_layers": [0],
             "rope_scaling": {**_ROPE, "fope_init_factor": 0.5, "fope_sep_head": True,
                              "num_inv_freq": None},
          }, "vision_config": _VISION, **_IMAGE_TOKENS}),
    _row("interns2_mobius", "InternS2MobiusForConditionalGeneration", "interns2_mobius", "InternS2MobiusDecoderLayer",
         {"text_config": {
             **_TEXT, **GDN, "num_blocks": LAYERS, "num_experts": 4, "num_experts_per_tok": 2,
             "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "norm_topk_prob": True,
             "attention_bias": False, "attn_output_gate": True, "linear_conv_kernel_dim": 4, "rope_parameters": _AXES,
          }, "vision_config": _VISION, **_IMAGE_TOKENS}, **BFLOAT16),
    # HF has it, but its config has no fields for the experts of images and vLLM 0.32 requires them.
    _row("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_moe_vl", "Ernie4_5_VLMoeDecoderLayer",
         {**_TEXT, "use_bias": False, "freq_allocation": 4, "moe_num_experts": [4, 4], "moe_k": 2,
          "moe_intermediate_size": [64, 32], "moe_num_shared_experts": 2, "moe_layer_start_index": [1, 1],
          "moe_layer_end_index": [LAYERS - 1, LAYERS - 1], "moe_layer_interval": 1, "im_patch_id": 120,
          "pixel_hidden_size": 64, "spatial_conv_size": 2, "temporal_conv_size": 2, "use_temporal_conv": True,
          "vision_config": {"depth": 2, "embed_dim": HIDDEN, "hidden_size": HIDDEN, "hidden_act": "quick_gelu",
                            "in_channels": 3, "in_chans": 3, "mlp_ratio": 2, "num_heads": 2, "patch_size": 14,
                            "spatial_merge_size": 2, "rms_norm_eps": 1e-6}}),
    # HF has it with attention and MLP in one block; vLLM, like Nemotron-H, has a block for each.
    _row("cosmos3_edge", "Cosmos3EdgeForConditionalGeneration", "cosmos3_edge",
         "Cosmos3EdgeAttentionDecoderLayer+NemotronHMLPDecoderLayer",
         {"text_config": {**_TEXT, "rope_parameters": _AXES, "hidden_act": "relu2", "num_hidden_layers": LAYERS // 2,
                          "layers_block_type": ["full_attention", "mlp"] * (LAYERS // 2)},
          "vision_config": {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2,
                            "num_attention_heads": 2, "num_patches": 16},
          "projector_config": {"input_hidden_size": HIDDEN, "out_hidden_size": HIDDEN,
                               "merger_intermediate_size": 64}},
         recipe="FUSED-SINGLE", one_branch=True, mlp_blocks=(1, 3), branch_in_vllm="mixer.o_proj"),
    # Its attention scales with the token and the position; the first blocks are dense, the others have experts.
    _row("moondream3", "Moondream3ForCausalLM", "moondream3", "Moondream3DecoderLayer",
         {"config": {
             "text": {"dim": HIDDEN, "ff_dim": 128, "n_layers": LAYERS, "vocab_size": VOCAB, "n_heads": 2,
                      "n_kv_heads": 2, "max_context": MAX_POSITIONS, "prefix_attn": 2,
                      "moe": {"start_layer": 2, "n_experts": 4, "n_experts_per_tok": 2, "expert_inner_dim": 64}},
             "vision": {"enc_dim": HIDDEN, "enc_n_layers": 2, "enc_ff_dim": 64, "enc_n_heads": 2,
                        "proj_inner_dim": 64, "crop_size": 28},
          }}, recipe="PARALLEL", refused=("post_attn",), branch_in_vllm="attn"),
)  # fmt: skip
