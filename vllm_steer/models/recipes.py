# SPDX-License-Identifier: Apache-2.0
"""All recipes by decoder-layer class, with those of HF Transformers, which vLLM's Transformers backend runs.

A class without a recipe is refused when the engine starts: a tap in the wrong place gives fluent, wrong answers. The
rows of ``UNSUPPORTED`` give a better reason. HF Transformers' classes keep the stream in one tensor; each of their rows
is proven by ``tests/conformance``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from vllm_steer.models.recipe import Recipe
from vllm_steer.models.vllm_recipes import MODULES, VLLM_RECIPES


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


_ROWS: Final = {recipe.layer_class: recipe for recipe in (*VLLM_RECIPES, *TRANSFORMERS_RECIPES)}

RECIPES: Final[Mapping[str, Recipe]] = {
    name: replace(_ROWS[row.inherits], layer_class=name, inherits=row.inherits) if row.inherits else row
    for name, row in _ROWS.items()
}
"""Recipes by the qualified name of the class."""
PROVEN: Final = frozenset(name for name, recipe in RECIPES.items() if recipe.proven)
"""Qualified names of the classes whose recipe is proven."""


_NOT_NVIDIA: Final = "its hook points are proven only for the kernels of NVIDIA's GPUs"
_ENCODER: Final = "it is an encoder: it computes all positions together and generates nothing"

_OTHER_KERNELS: Final = (
    "it carries several residual streams, and its hook points are proven only for the kernels of NVIDIA's GPUs"
)

_OTHERS: Final = ("amd", "xpu")

_FUSED: Final = (
    "its additions to the residual stream are parts of kernels, for which no proof of its hook points has run"
)
_DRAFT: Final = "it is a layer of a draft model, which is not steered"
_SPHERE: Final = (
    "each of its layers is an attention or an MLP alone, whose output is mixed into the stream by an interpolation on "
    "a sphere, so no tensor holds a stream between attention and MLP"
)

UNSUPPORTED: Final[Mapping[str, str]] = {
    "vllm.models.inkling.amd.model.InklingDecoderLayer": _NOT_NVIDIA,
    "vllm.models.deepseek_v32.amd.model.DeepseekV32DecoderLayer": _NOT_NVIDIA,
    # Classes that are new in 0.33.
    "vllm.models.beam.nvidia.model.BeamDecoderLayer": _FUSED,
    "vllm.models.beam.nvidia.dflash2.DFlash2BeamDecoderLayer": _DRAFT,
    "vllm.models.flint.model.FlintDecoderLayer": _FUSED,
    "vllm.models.muse_spark.amd.model.MuseSpark1xDecoderLayer": _FUSED,
    "vllm.models.muse_spark.nvidia.model.MuseSpark1xDecoderLayer": _FUSED,
    "vllm.models.muse_spark.common.dspark.MuseSparkDSparkDecoderLayer": _DRAFT,
    "vllm.models.step5.nvidia.model.Step5DecoderLayer": "it is new in vLLM 0.33, and its hook points are not proven",
    MODULES + "dory.DoryDecoderLayer": _SPHERE,
    **{
        f"vllm.models.{family}.{platform}.model.{layer}": _OTHER_KERNELS
        for family, layer in (
            ("deepseek_v4", "DeepseekV4DecoderLayer"),
            ("deepseek_v41", "DeepseekV4DecoderLayer"),
            ("hy_v4", "HYV4DecoderLayer"),
            ("qwen4_exp", "Qwen4ExpDecoderLayer"),
        )
        for platform in _OTHERS
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
"""Known decoder-layer classes that cannot be steered, with the reason that the engine reports at start."""
