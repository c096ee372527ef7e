# SPDX-License-Identifier: Apache-2.0
"""Recipes of the decoder-layer classes of HF Transformers, which vLLM's Transformers backend runs.

All of them keep the stream in one tensor. Each row is proven by ``tests/conformance``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vllm_steer.models.recipe import Recipe


def _sequential(model: str, layer: str, post_attn: str = "post_attention_layernorm", attn: str = "self_attn") -> Recipe:
    return Recipe(_qualified(model, layer), "single", post_attn, attn, "mlp")


def _post_norm(model: str, layer: str) -> Recipe:
    """Return the row of a block that normalizes its branches and whose MLP reads the stream itself."""
    norms = "post_attention_layernorm", "post_feedforward_layernorm"
    return Recipe(_qualified(model, layer), "single", "mlp", *norms)


def _parallel(model: str, layer: str, attn: str, **more: Any) -> Recipe:
    return Recipe(_qualified(model, layer), "single", None, attn, "mlp", **more)


def _qualified(model: str, layer: str) -> str:
    return f"transformers.models.{model}.modeling_{model}.{layer}"


def _gpt_neox(layer: Any) -> Mapping[str, Any]:
    return {} if layer.use_parallel_residual else {"post_attn": "post_attention_layernorm"}


TRANSFORMERS_RECIPES: Final[tuple[Recipe, ...]] = (
    _sequential("arcee", "ArceeDecoderLayer"),
    _sequential("bitnet", "BitNetDecoderLayer"),
    _sequential("cwm", "CwmDecoderLayer"),
    _sequential("dots1", "Dots1DecoderLayer"),
    _sequential("emu3", "Emu3DecoderLayer"),
    _sequential("hunyuan_vl", "HunYuanVLDenseV1DecoderLayer"),
    _post_norm("flex_olmo", "FlexOlmoDecoderLayer"),
    _sequential("glm", "GlmDecoderLayer"),
    _sequential("gpt_bigcode", "GPTBigCodeBlock", "ln_2", "attn"),
    _parallel("gpt_neox", "GPTNeoXLayer", "attention", variant=_gpt_neox),
    _sequential("helium", "HeliumDecoderLayer"),
    _sequential("hunyuan_v1_dense", "HunYuanDenseV1DecoderLayer"),
    _sequential("hunyuan_v1_moe", "HunYuanMoEV1DecoderLayer"),
    _sequential("jais2", "Jais2DecoderLayer"),
    _sequential("mellum", "MellumDecoderLayer"),
    _sequential("ministral", "MinistralDecoderLayer"),
    _sequential("nanochat", "NanoChatDecoderLayer"),
    _sequential("olmo", "OlmoDecoderLayer"),
    _post_norm("olmo2", "Olmo2DecoderLayer"),
    _post_norm("olmo3", "Olmo3DecoderLayer"),
    _sequential("persimmon", "PersimmonDecoderLayer"),
    _parallel("phi", "PhiDecoderLayer", "self_attn"),
    _sequential("qwen2", "Qwen2DecoderLayer"),
    _sequential("seed_oss", "SeedOssDecoderLayer"),
    _sequential("smollm3", "SmolLM3DecoderLayer"),
    _sequential("solar_open", "SolarOpenDecoderLayer"),
    _sequential("starcoder2", "Starcoder2DecoderLayer"),
    _sequential("vaultgemma", "VaultGemmaDecoderLayer", "pre_feedforward_layernorm"),
)
