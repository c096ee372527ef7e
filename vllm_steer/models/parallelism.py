# SPDX-License-Identifier: Apache-2.0
"""Splits over several ranks of models with several residual streams and of looped models: proven or refused.

docs/reference/streams.md shows this table. ``tests/conformance/test_two_ranks.py`` proves it: it runs the splits that
are proven, and the refusals of vLLM, which has no pipeline stages for some models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Split = Literal["proven", "unproven", "not in vLLM"]


@dataclass(frozen=True)
class Parallelism:
    """Splits of one family of decoder layers."""

    family: str
    layer_classes: Sequence[str]
    """Endings of the qualified names of the classes."""
    tensor: Split
    pipeline: Split
    both: Split
    between: str = ""
    """What a pipeline stage hands to the next, in words."""


def _proven(family: str, *layer_classes: str, between: str = "the complete streams") -> Parallelism:
    return Parallelism(family, layer_classes, "proven", "proven", "proven", between)


def _without_stages(family: str, layer_class: str) -> Parallelism:
    return Parallelism(family, (layer_class,), "proven", "not in vLLM", "not in vLLM")


PARALLELISM: Final = (
    _proven(
        "DeepSeek V4", "deepseek_v4.nvidia.model.DeepseekV4DecoderLayer", "deepseek_v4.cpu.model.DeepseekV4DecoderLayer"
    ),
    _proven("DeepSeek V4.1", "deepseek_v41.nvidia.model.DeepseekV4DecoderLayer"),
    # vLLM starts its pipeline stages, although its source says that they are incomplete.
    Parallelism("GLM 5 Next", ("glm5next.common.model.Glm5NextDecoderLayer",), "proven", "unproven", "unproven"),
    _proven("HY V4", "hy_v4.nvidia.model.HYV4DecoderLayer"),
    _proven("Qwen 4 (Exp)", "qwen4_exp.nvidia.model.Qwen4ExpDecoderLayer"),
    _without_stages("Gemma 3n", "gemma3n.Gemma3nDecoderLayer"),
    _proven("Kimi K3", "kimi_k3.nvidia.model.KimiDecoderLayer", between="the running sum and the bank"),
    _without_stages("HRM-Text", "hrm_text.HrmTextDecoderLayer"),
    _without_stages("IQuest-LoopCoder", "iquest_loopcoder.LoopCoderDecoderLayer"),
)


def why_unproven_split(layer_class: str, *, tensor: bool, pipeline: bool) -> str | None:
    """Return why a model cannot be split in this way, or None.

    Args:
        layer_class: Qualified name of the class of a decoder layer.
        tensor: Whether layers are split over several ranks.
        pipeline: Whether the model has several pipeline stages.
    """
    for row in PARALLELISM:
        if not layer_class.endswith(tuple(f".{each}" for each in row.layer_classes)):
            continue
        if tensor and pipeline and row.both != "proven":
            return _refusal(row, "tensor and pipeline parallelism together", pipeline)
        if tensor and row.tensor != "proven":
            return _refusal(row, "tensor parallelism", pipeline)
        if pipeline and row.pipeline != "proven":
            return _refusal(row, "pipeline parallelism", pipeline)
    return None


def _refusal(row: Parallelism, split: str, pipeline: bool) -> str:
    """Return the reason why a split is refused, with a split that is proven instead."""
    if pipeline and row.tensor == "proven":
        instead = "use tensor parallelism alone (--pipeline-parallel-size 1)"
    elif row.pipeline == "proven":
        instead = "use pipeline parallelism alone (--tensor-parallel-size 1)"
    else:
        instead = "use one device (--tensor-parallel-size 1 --pipeline-parallel-size 1)"
    return f"hook points of {row.family} are not proven with {split}; {instead}"


def why_wrong_stage(number: int, first: Any) -> str | None:
    """Return why vLLM computes wrong outputs if a pipeline stage begins with a layer, or None.

    Args:
        number: Number of the layer in the whole model.
        first: The layer.
    """
    if number and getattr(first, "engram", None) is not None:
        return (
            f"a pipeline stage begins with layer {number}, an Engram layer (engram_layer_ids in config.json), but vLLM "
            "leaves Engram out in the first layer of a stage; vLLM then computes wrong outputs, also without steering. "
            "Set VLLM_PP_LAYER_PARTITION (layers per stage, e.g. 20,23) so that no stage begins with a layer in "
            "engram_layer_ids"
        )
    return None
