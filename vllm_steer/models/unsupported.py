# SPDX-License-Identifier: Apache-2.0
"""Known decoder-layer classes that cannot be steered, with the reason that the engine reports at start.

Classes without a recipe are refused as well; these rows give a better reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vllm_steer.models.vllm_recipes import MODULES

_STREAMS: Final = "it carries several residual streams and mixes them, so no single stream can be read or edited"
_DEFERRED: Final = "its blocks pass a branch on for the next block to filter and add, so no tensor holds the stream"
_ENCODER: Final = "it is an encoder: it computes all positions together and generates nothing"

_PLATFORMS: Final = ("nvidia", "amd", "cpu", "xpu", "common")

UNSUPPORTED: Final[Mapping[str, str]] = {
    **{
        f"vllm.models.{family}.{platform}.model.{layer}": reason
        for family, layer, reason in (
            ("deepseek_v4", "DeepseekV4DecoderLayer", _STREAMS),
            ("deepseek_v41", "DeepseekV4DecoderLayer", _STREAMS),
            ("glm5next", "Glm5NextDecoderLayer", _STREAMS),
            ("hy_v4", "HYV4DecoderLayer", _STREAMS),
            ("inkling", "InklingDecoderLayer", _DEFERRED),
            ("qwen4_exp", "Qwen4ExpDecoderLayer", _STREAMS),
        )
        for platform in _PLATFORMS
    },
    **{
        MODULES + layer: reason
        for layer, reason in (
            ("bert.BertLayer", _ENCODER),
            ("bert_with_rope.BertWithRopeBlock", _ENCODER),
            ("embedding_gemma2.EmbeddingGemma2DecoderLayer", _ENCODER),
            ("modernbert.ModernBertLayer", _ENCODER),
            ("openai_privacy_filter.OpenAIPrivacyFilterDecoderLayer", _ENCODER),
        )
    },
}

UNSUPPORTED_ARCHITECTURES: Final[Mapping[str, str]] = {
    "KimiK3ForConditionalGeneration": _STREAMS,
    "NanbeigeForCausalLM": (
        "its layers are code of the checkpoint, and Transformers has no such class, so its source cannot be proven"
    ),
}
"""Architectures that are refused although classes of layers that they name have a recipe, or name none."""
