# SPDX-License-Identifier: Apache-2.0
"""Decoder-layer classes that are refused when the engine starts, with the reason.

A class that is neither here nor in the recipes is refused as well; these are the ones that were looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_STREAMS: Final = "it carries several residual streams and mixes them, so there is no one stream to read or edit"
_RESIDUALS: Final = (
    "with attention residuals (Kimi-K3) it carries several residual streams and mixes them; without them (Kimi-Linear) "
    "it has one, for which no recipe is proven"
)
_DEFERRED: Final = (
    "its blocks hand a branch on unadded, for the next block to filter and add, so no tensor is the stream"
)
_KERNELS: Final = (
    "its sums over tensor-parallel ranks and its norms are one kernel, called with the norm's weights: the norm's own "
    "forward, in front of which edits are made, does not run"
)
_LOOPED: Final = "its layers run several times per token, and a layer's number does not say which of them is meant"
_SKIPS: Final = "it adds earlier streams again between blocks, so what one block leaves is not what the next one enters"
_CROSS: Final = "its decoder attends to an encoder between attention and MLP, which no recipe covers"
_ENCODER: Final = "it is an encoder: all positions are computed together, and it generates nothing"

_VLLM: Final = "vllm.model_executor.models."
REFUSED: Final[Mapping[str, str]] = {
    f"{_VLLM}gemma3n.Gemma3nDecoderLayer": _STREAMS,
    **{
        f"vllm.models.{family}.{platform}.model.{layer}": reason
        for family, layer, reason in (
            ("deepseek_v4", "DeepseekV4DecoderLayer", _STREAMS),
            ("deepseek_v41", "DeepseekV4DecoderLayer", _STREAMS),
            ("glm5next", "Glm5NextDecoderLayer", _STREAMS),
            ("hy_v4", "HYV4DecoderLayer", _STREAMS),
            ("kimi_k3", "KimiDecoderLayer", _RESIDUALS),
            ("qwen4_exp", "Qwen4ExpDecoderLayer", _STREAMS),
            ("inkling", "InklingDecoderLayer", _DEFERRED),
            ("deepseek_v32", "DeepseekV32DecoderLayer", _KERNELS),
            ("dots3_note", "Dots3NoteDecoderLayer", _KERNELS),
            ("minimax_m3", "MiniMaxM3DecoderLayer", _KERNELS),
        )
        for platform in ("nvidia", "amd", "cpu", "xpu", "common")
    },
    "vllm.models.kimi_k3.amd.linear.KimiDecoderLayer": _RESIDUALS,
    f"{_VLLM}hrm_text.HrmTextDecoderLayer": _LOOPED,
    f"{_VLLM}iquest_loopcoder.LoopCoderDecoderLayer": _LOOPED,
    f"{_VLLM}solar.SolarDecoderLayer": _SKIPS,
    f"{_VLLM}whisper.WhisperDecoderLayer": _CROSS,
    f"{_VLLM}cohere_asr.CohereASRDecoderLayer": _CROSS,
    f"{_VLLM}nemotron_parse.MBartDecoderLayer": _CROSS,
    f"{_VLLM}nemotron_parse.BartDecoderLayer": _CROSS,
    f"{_VLLM}bert.BertLayer": _ENCODER,
    f"{_VLLM}bert_with_rope.BertWithRopeBlock": _ENCODER,
    f"{_VLLM}modernbert.ModernBertLayer": _ENCODER,
    f"{_VLLM}openai_privacy_filter.OpenAIPrivacyFilterDecoderLayer": _ENCODER,
    f"{_VLLM}embedding_gemma2.EmbeddingGemma2DecoderLayer": _ENCODER,
}
