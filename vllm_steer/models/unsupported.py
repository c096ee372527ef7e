# SPDX-License-Identifier: Apache-2.0
"""Known decoder-layer classes that cannot be steered, with the reason that the engine reports at start.

Classes without a recipe are refused as well; these rows give a better reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vllm_steer.models.vllm_recipes import MODULES

_STREAMS: Final = "it carries several residual streams and mixes them, so no single stream can be read or edited"
_RESIDUALS: Final = (
    "with attention residuals (Kimi-K3) it carries several residual streams and mixes them; without them (Kimi-Linear) "
    "it has one, for which no recipe is proven"
)
_DEFERRED: Final = "its blocks pass a branch on for the next block to filter and add, so no tensor holds the stream"
_FUSED: Final = (
    "it fuses the tensor-parallel reduction and the norm into one kernel that takes the norm's weights: the norm's "
    "forward, before which edits are made, does not run"
)
_LOOPED: Final = "its layers run several times per token, so a layer number is ambiguous"
_SKIPS: Final = "it adds earlier streams again between blocks, so the next block does not read what a block leaves"
_CROSS: Final = "its decoder attends to an encoder between attention and MLP, which no recipe covers"
_ENCODER: Final = "it is an encoder: it computes all positions together and generates nothing"

_PLATFORMS: Final = ("nvidia", "amd", "cpu", "xpu", "common")

UNSUPPORTED: Final[Mapping[str, str]] = {
    **{
        f"vllm.models.{family}.{platform}.model.{layer}": reason
        for family, layer, reason in (
            ("deepseek_v32", "DeepseekV32DecoderLayer", _FUSED),
            ("deepseek_v4", "DeepseekV4DecoderLayer", _STREAMS),
            ("deepseek_v41", "DeepseekV4DecoderLayer", _STREAMS),
            ("dots3_note", "Dots3NoteDecoderLayer", _FUSED),
            ("glm5next", "Glm5NextDecoderLayer", _STREAMS),
            ("hy_v4", "HYV4DecoderLayer", _STREAMS),
            ("inkling", "InklingDecoderLayer", _DEFERRED),
            ("kimi_k3", "KimiDecoderLayer", _RESIDUALS),
            ("minimax_m3", "MiniMaxM3DecoderLayer", _FUSED),
            ("qwen4_exp", "Qwen4ExpDecoderLayer", _STREAMS),
        )
        for platform in _PLATFORMS
    },
    "vllm.models.kimi_k3.amd.linear.KimiDecoderLayer": _RESIDUALS,
    **{
        MODULES + layer: reason
        for layer, reason in (
            ("bert.BertLayer", _ENCODER),
            ("bert_with_rope.BertWithRopeBlock", _ENCODER),
            ("cohere_asr.CohereASRDecoderLayer", _CROSS),
            ("embedding_gemma2.EmbeddingGemma2DecoderLayer", _ENCODER),
            ("gemma3n.Gemma3nDecoderLayer", _STREAMS),
            ("hrm_text.HrmTextDecoderLayer", _LOOPED),
            ("iquest_loopcoder.LoopCoderDecoderLayer", _LOOPED),
            ("modernbert.ModernBertLayer", _ENCODER),
            ("nemotron_parse.BartDecoderLayer", _CROSS),
            ("nemotron_parse.MBartDecoderLayer", _CROSS),
            ("openai_privacy_filter.OpenAIPrivacyFilterDecoderLayer", _ENCODER),
            ("solar.SolarDecoderLayer", _SKIPS),
            ("whisper.WhisperDecoderLayer", _CROSS),
        )
    },
}
