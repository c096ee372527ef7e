# SPDX-License-Identifier: Apache-2.0
"""Multimodal models, of which the language model is steered; requests have only text, so no tower runs."""

from __future__ import annotations

from typing import Any, Final

from tests.conformance.model import HIDDEN, LAYERS, Part, TinyModel
from tests.conformance.shapes import (
    BFLOAT16,
    COHERE2,
    EXAONE,
    GDN,
    GEMMA,
    GQA,
    LOCAL,
    MQA,
    NATIVE,
    PARALLEL,
    POST_NORM,
    SANDWICH,
)  # fmt: skip

CLIP: Final = Part("CLIPVisionConfig")
SIGLIP: Final = Part("SiglipVisionConfig")
# Positions have three axes, which are equal in text.
_AXES: Final[dict[str, Any]] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
}
# GLM rotates half of a head.
_HALF: Final[dict[str, Any]] = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5
    }
}  # fmt: skip
_EMU_IMAGES: Final = Part(
    "Emu3VQVAEConfig",
    {"codebook_size": 16, "base_channels": 32, "channel_multiplier": (1, 1), "num_res_blocks": 1, "hidden_size": 32,
     "attn_resolutions": ()},
)  # fmt: skip
_EMU_TOKENS: Final = {
    "<image>": 123, "<|extra_200|>": 120, **{f"<|visual token {number:06}|>": 100 + number for number in range(16)}
}  # fmt: skip
# Four axes: the position, then three of the image.
_FOUR_AXES: Final = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4] * 4}}


def _row(
    config: str, text: Part, layer: str, recipe: str = "FUSED", tower: Part | None = None, **more: Any
) -> TinyModel:
    """Return a row; ``tower`` is given if the wrapper's config class does not fix the kind of its tower."""
    name = config.removesuffix("Config").strip("_").lower() + "_wrapper"
    settings = {"text_config": text, **more.pop("settings", {})}
    if tower is not None:
        settings[more.pop("tower_config", "vision_config")] = tower
    more = {"blocks": "model.language_model.layers", "auto": "AutoModelForMultimodalLM", **more}
    more["engine"] = {"language_model_only": True, **more.pop("engine", {})}
    return TinyModel(name, config, settings, recipe, layer, **more)


# fmt: off
WRAPPERS: Final[tuple[TinyModel, ...]] = (
    _row("LlavaConfig", Part("LlamaConfig", GQA), "LlamaDecoderLayer", tower=CLIP),
    _row("LlavaNextConfig", Part("MistralConfig", {**GQA, "sliding_window": None}), "MistralDecoderLayer", tower=CLIP),
    _row("LlavaNextVideoConfig", Part("LlamaConfig", GQA), "LlamaDecoderLayer", tower=CLIP),
    _row("LlavaOnevisionConfig", Part("Qwen2Config", MQA), "Qwen2DecoderLayer", tower=SIGLIP),
    _row("Gemma3Config", Part("Gemma3TextConfig", GEMMA), "Gemma3DecoderLayer", **SANDWICH),
    _row("PaliGemmaConfig", Part("GemmaConfig", GQA), "GemmaDecoderLayer", tower=SIGLIP,
         no_parity="in HF the tokens of a prompt attend to each other in both directions"),
    _row("Mistral3Config", Part("MistralConfig", {**GQA, "sliding_window": None}), "MistralDecoderLayer",
         tower=Part("PixtralVisionConfig")),
    _row("Idefics3Config", Part("LlamaConfig", GQA), "LlamaDecoderLayer", blocks="model.text_model.layers"),
    _row("SmolVLMConfig", Part("LlamaConfig", GQA), "LlamaDecoderLayer", blocks="model.text_model.layers"),
    _row("AriaConfig", Part("AriaTextConfig", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
         "AriaTextDecoderLayer", tower=Part("Idefics3VisionConfig")),
    _row("Qwen2VLConfig", Part("Qwen2VLTextConfig", {**MQA, **_AXES}), "Qwen2DecoderLayer"),
    _row("Qwen2_5_VLConfig", Part("Qwen2_5_VLTextConfig", {**MQA, **_AXES}), "Qwen2DecoderLayer"),
    _row("Qwen3VLConfig", Part("Qwen3VLTextConfig", {**GQA, **_AXES}), "Qwen3VLDecoderLayer"),
    _row("GlmOcrConfig", Part("GlmOcrTextConfig", _HALF), "Glm4DecoderLayer", branch="post_self_attn_layernorm"),
    _row("Cohere2VisionConfig", Part("Cohere2Config", {**MQA, **COHERE2, "logit_scale": 1.0}), "CohereDecoderLayer",
         "PARALLEL", tower=SIGLIP, **PARALLEL),
    _row("InternVLConfig", Part("Qwen2Config", MQA), "Qwen2DecoderLayer"),
    _row("Lfm2VlConfig", Part("Lfm2Config", {"conv_dim": HIDDEN, "conv_dim_out": HIDDEN, "block_dim": HIDDEN,
         "block_ff_dim": 128, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]
         * (LAYERS // 2)}), "Lfm2AttentionDecoderLayer+Lfm2ShortConvDecoderLayer", tower=Part("Siglip2VisionConfig"),
         branch="self_attn|conv", reads_mid="ffn_norm", **NATIVE),
    _row("Llama4Config", Part("Llama4TextConfig", {"intermediate_size_mlp": 128, "interleave_moe_layer_step": 2,
         "num_experts_per_tok": 1, "attention_chunk_size": 128}), "Llama4DecoderLayer",
         blocks="language_model.model.layers"),
    _row("PaddleOCRVLConfig", Part("PaddleOCRTextConfig", {**GQA, **_AXES}), "LlamaDecoderLayer"),
    _row("Exaone4_5_Config", Part("Exaone4Config", EXAONE), "Exaone4DecoderLayer", "UNFUSED+POSTNORM",
         tower=Part("Exaone4_5_VisionConfig"), **POST_NORM),
    _row("Qwen3ASRConfig", Part("Qwen3Config", GQA), "Qwen3DecoderLayer",
         tower=Part("Qwen3ASREncoderConfig"), tower_config="audio_config"),
    _row("Gemma4Config", Part("Gemma4TextConfig", {**LOCAL, "global_head_dim": 32, "hidden_size_per_layer_input": 16,
         "vocab_size_per_layer_input": 128, "enable_moe_block": True, "top_k_experts": 2}), "Gemma4DecoderLayer",
         "UNFUSED+POSTNORM", **SANDWICH),
    # On the Transformers backend.
    _row("HunYuanVLConfig", Part("HunYuanVLTextConfig", {**GQA, **_FOUR_AXES}), "HunYuanVLDenseV1DecoderLayer",
         "UNFUSED", settings={"image_token_id": 125}),
    _row("Emu3Config", Part("Emu3TextConfig", MQA), "Emu3DecoderLayer", "UNFUSED", blocks="model.text_model.layers",
         settings={"vq_config": _EMU_IMAGES, "vocabulary_map": _EMU_TOKENS}),
    _row("Qwen3_5Config", Part("Qwen3_5TextConfig", GDN), "Qwen3_5DecoderLayer", branch="linear_attn|self_attn",
         **BFLOAT16),
    _row("Qwen3_5MoeConfig", Part("Qwen3_5MoeTextConfig", GDN), "Qwen3_5DecoderLayer",
         branch="linear_attn|self_attn", **BFLOAT16),
)
# fmt: on
