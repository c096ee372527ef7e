# SPDX-License-Identifier: Apache-2.0
"""Known decoder-layer classes that cannot be steered, with the reason that the engine reports at start.

Classes without a recipe are refused as well; these rows give a better reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vllm_steer.models.vllm_recipes import MODULES

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

UNSUPPORTED_ARCHITECTURES: Final[Mapping[str, str]] = {
    "DiffusionGemmaForBlockDiffusion": "it is a diffusion language model: its tokens are not generated in order",
    "NanbeigeForCausalLM": (
        "vLLM runs it with Transformers, which has no class of it, so its layers are remote code that comes with each "
        "checkpoint; no proof of one checkpoint's code holds for another's"
    ),
}
"""Architectures that are refused although classes of layers that they name have a recipe, or name none."""
