# SPDX-License-Identifier: Apache-2.0
"""Decoders on vLLM's Transformers backend: the layer classes are HF's."""

from __future__ import annotations

from typing import Final

from tests.conformance.model import TinyModel
from tests.conformance.shapes import (
    BASE,
    GPT,
    LOCAL,
    MQA,
    NEOX_AT,
    PARALLEL,
    POST_NORM,
    SOFT_CAPS,
)  # fmt: skip

# fmt: off
BACKEND: Final[tuple[TinyModel, ...]] = (
    TinyModel("gpt_neox", "GPTNeoXConfig", BASE, "PARALLEL", "GPTNeoXLayer", **NEOX_AT, **PARALLEL),
    TinyModel("gpt_neox_seq", "GPTNeoXConfig", {**BASE, "use_parallel_residual": False},
              "UNFUSED", "GPTNeoXLayer", **NEOX_AT),
    TinyModel("phi", "PhiConfig", MQA, "PARALLEL", "PhiDecoderLayer", **PARALLEL),
    TinyModel("olmo", "OlmoConfig", BASE, "UNFUSED", "OlmoDecoderLayer"),
    TinyModel("olmo2", "Olmo2Config", BASE, "UNFUSED+POSTNORM", "Olmo2DecoderLayer",
              **POST_NORM),
    TinyModel("starcoder2", "Starcoder2Config", MQA, "UNFUSED", "Starcoder2DecoderLayer"),
    TinyModel("smollm3", "SmolLM3Config", MQA, "UNFUSED", "SmolLM3DecoderLayer"),
    TinyModel("arcee", "ArceeConfig", {}, "UNFUSED", "ArceeDecoderLayer"),
    TinyModel("cwm", "CwmConfig", {**LOCAL}, "UNFUSED", "CwmDecoderLayer"),
    TinyModel("flex_olmo", "FlexOlmoConfig", {}, "UNFUSED+POSTNORM", "FlexOlmoDecoderLayer", **POST_NORM),
    TinyModel("glm", "GlmConfig", {}, "UNFUSED", "GlmDecoderLayer"),
    TinyModel("gpt_bigcode", "GPTBigCodeConfig", GPT, "UNFUSED", "GPTBigCodeBlock", blocks="transformer.h",
              branch="attn", reads_mid="ln_2"),
    TinyModel("hunyuan_dense", "HunYuanDenseV1Config", {}, "UNFUSED", "HunYuanDenseV1DecoderLayer"),
    TinyModel("hunyuan_moe", "HunYuanMoEV1Config", {}, "UNFUSED", "HunYuanMoEV1DecoderLayer"),
    TinyModel("jais2", "Jais2Config", {}, "UNFUSED", "Jais2DecoderLayer"),
    TinyModel("mellum", "MellumConfig", {}, "UNFUSED", "MellumDecoderLayer"),
    TinyModel("olmo3", "Olmo3Config", LOCAL, "UNFUSED+POSTNORM", "Olmo3DecoderLayer", **POST_NORM),
    TinyModel("seed_oss", "SeedOssConfig", {}, "UNFUSED", "SeedOssDecoderLayer"),
    TinyModel("vaultgemma", "VaultGemmaConfig", LOCAL, "UNFUSED", "VaultGemmaDecoderLayer",
              reads_mid="pre_feedforward_layernorm", **SOFT_CAPS),
    TinyModel("bitnet", "BitNetConfig", {}, "UNFUSED", "BitNetDecoderLayer"),
    TinyModel("dots1", "Dots1Config", {}, "UNFUSED", "Dots1DecoderLayer"),
    TinyModel("helium", "HeliumConfig", {"num_attention_heads": 2, "num_key_value_heads": 1}, "UNFUSED",
              "HeliumDecoderLayer"),
    TinyModel("ministral", "MinistralConfig", {**LOCAL}, "UNFUSED", "MinistralDecoderLayer"),
    TinyModel("nanochat", "NanoChatConfig", {}, "UNFUSED", "NanoChatDecoderLayer"),
    TinyModel("persimmon", "PersimmonConfig", {}, "UNFUSED", "PersimmonDecoderLayer"),
    TinyModel("solar_open", "SolarOpenConfig", {}, "UNFUSED", "SolarOpenDecoderLayer"),
    TinyModel("qwen2_backend", "Qwen2Config", MQA, "UNFUSED", "Qwen2DecoderLayer",
              engine={"model_impl": "transformers"}),
)
# fmt: on
