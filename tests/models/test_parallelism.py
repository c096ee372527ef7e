# SPDX-License-Identifier: Apache-2.0
"""The table of splits that are proven or refused, and the refusal at start."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_steer.config import SteeringConfig
from vllm_steer.engine.model_setup import _with_split
from vllm_steer.models.discovery import Decoder, DecoderLayer, UnsupportedModelError
from vllm_steer.models.parallelism import PARALLELISM, Parallelism, why_unproven_split
from vllm_steer.models.recipes import RECIPES

KIMI = "vllm.models.kimi_k3.nvidia.model.KimiDecoderLayer"


def special() -> set[str]:
    """Return the layer classes with several streams, and those of looped models."""
    return {KIMI, *(name for name, recipe in RECIPES.items() if recipe.shape == "streams" or recipe.runs)}


def test_has_every_family() -> None:
    """Catches a family with several streams, or a looped one, whose splits are neither proven nor refused."""
    listed = {name for row in PARALLELISM for name in row.layer_classes}
    assert {name for name in special() if not name.endswith(tuple(f".{each}" for each in listed))} == set()
    assert all(any(name.endswith(f".{each}") for name in special()) for each in listed)


@pytest.mark.parametrize("row", PARALLELISM, ids=lambda row: row.family)
def test_refuses_what_is_not_proven(row: Parallelism) -> None:
    """Catches a split that the table does not call proven and that starts, or the reverse."""
    for layer_class in row.layer_classes:
        for tensor, pipeline, status in (
            (True, False, row.tensor),
            (False, True, row.pipeline),
            (True, True, row.both),
        ):
            why = why_unproven_split(f"vllm.models.{layer_class}", tensor=tensor, pipeline=pipeline)
            assert (why is None) == (status == "proven")
        assert why_unproven_split(f"vllm.models.{layer_class}", tensor=False, pipeline=False) is None


def decoder(layer_class: str) -> Decoder:
    recipe = RECIPES[layer_class]
    module, _, name = layer_class.rpartition(".")
    layer: Any = type(name, (), {"__module__": module})()
    return Decoder((DecoderLayer(0, layer, recipe),), 2, tensor_parallel=True)


def test_an_engine_refuses_an_unproven_split() -> None:
    """Catches a split that the table refuses and the engine serves, and an override that leaves no trace."""
    found = decoder("vllm.models.glm5next.common.model.Glm5NextDecoderLayer")
    with pytest.raises(
        UnsupportedModelError, match="DecoderLayer cannot be steered: hook points of GLM 5 Next are not"
    ):
        _with_split(found, SteeringConfig(), pipeline=True)
    assert _with_split(found, SteeringConfig(), pipeline=False) is found
    (doubt,) = _with_split(found, SteeringConfig(allow_unproven=True), pipeline=True).unproven
    assert "together; use tensor parallelism alone (--pipeline-parallel-size 1)" in doubt


def test_refuses_a_stage_that_begins_with_an_engram_layer() -> None:
    """Catches a stage whose first layer lacks its memory, an override that allows it, and a refusal elsewhere."""
    (only,) = decoder("vllm.models.deepseek_v41.nvidia.model.DeepseekV4DecoderLayer").layers
    module: Any = only.module
    for number, engram, refused in ((2, object(), True), (2, None, False), (0, object(), False)):
        module.engram = engram
        found = Decoder((DecoderLayer(number, module, only.recipe),), 4)
        if not refused:
            assert _with_split(found, SteeringConfig(), pipeline=True) is found
            continue
        for allowed in (False, True):  # vLLM's own outputs are wrong, so nothing lifts the refusal
            with pytest.raises(UnsupportedModelError, match=r"layer 2, .*VLLM_PP_LAYER_PARTITION") as error:
                _with_split(found, SteeringConfig(allow_unproven=allowed), pipeline=True)
            assert "unproven" not in str(error.value)


def test_ordinary_models_may_have_both() -> None:
    """Catches a refusal of models with one stream, such as Kimi-Linear, which shares Kimi K3's class."""
    for name in (
        "vllm.model_executor.models.llama.LlamaDecoderLayer",
        "vllm.models.kimi_k3.nvidia.model.KimiDecoderLayer",
    ):
        found = decoder(name)
        assert _with_split(found, SteeringConfig(), pipeline=True) is found
