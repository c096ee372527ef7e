# SPDX-License-Identifier: Apache-2.0
"""The table of points on the branches: each is served at a place, or refused with a reason, and never neither."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.conformance.branches import served_branches
from tests.conformance.model import TinyModel
from tests.conformance.no_reference import NO_REFERENCE
from tests.conformance.zoo import ZOO
from vllm_steer.models.branches import BRANCHES, NOT_SERVED, SUMMAND, not_served, place_of, why_not
from vllm_steer.models.recipes import BY_LAYER, RECIPES, Recipe
from vllm_steer.points import OPTIONAL_POINTS

VLLM = "vllm.model_executor.models."


def layer(**settings: Any) -> Any:
    """A layer that has every submodule, and these settings."""
    made = nn.Module()
    for name in ("self_attn", "mlp", "fc2"):
        setattr(made, name, nn.Linear(1, 1))
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def refused(name: str, made: Any, tensor_parallel: bool = False) -> set[str]:
    recipe = BY_LAYER[VLLM + name].of(made)
    return {p for p in OPTIONAL_POINTS if not_served(p, recipe, made, tensor_parallel) is not None}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.layer.rpartition(".")[2])
def test_each_point_has_a_place_or_a_reason(recipe: Recipe) -> None:
    """Catches a class whose point is accepted and tapped nowhere, and a refusal that does not name the class."""
    for point in OPTIONAL_POINTS:
        reason = why_not(point, recipe)
        if reason is None and point == "mlp_in":
            assert place_of(point, recipe, None) == recipe.mid not in (None, "mlp")
        elif reason is None:
            assert recipe.shape == "pair" or BRANCHES[recipe.layer][OPTIONAL_POINTS.index(point) // 2]
        else:
            assert "{layer}" in reason


def test_the_tables_name_known_classes_only() -> None:
    """Catches a row that a misspelt name keeps from ever being read."""
    assert not {*BRANCHES, *NOT_SERVED} - set(BY_LAYER)
    assert all(BY_LAYER[name].shape == "single" for name in BRANCHES)


@pytest.mark.parametrize("tiny", [*ZOO, *NO_REFERENCE], ids=str)
def test_what_is_proven_is_served_by_the_class(tiny: TinyModel) -> None:
    """Catches a class that is served without a model of the conformance tests that shows it, and the other way round.

    Settings of a model can take points away: those rows are told apart below.
    """
    by_name = {name.rpartition(".")[2]: recipe for name, recipe in BY_LAYER.items()}
    served = {p for p in OPTIONAL_POINTS if all(why_not(p, by_name[name]) is None for name in tiny.layers)}
    if tiny.name in (
        "opt_post_ln",
        "falcon",
        "falcon_new",
        "falcon_rw",
        "gpt_neox_seq",
        "gemma4",
        "gemma4_wrapper",
        "qwen3_5moe_wrapper",
    ):
        assert served != set(served_branches(tiny))
    else:
        assert served == set(served_branches(tiny))


def test_settings_take_points_away() -> None:
    """Catches branches of a variant that are not what the stream grows by."""
    assert refused("opt.OPTDecoderLayer", layer(do_layer_norm_before=True)) == set()
    assert refused("opt.OPTDecoderLayer", layer(do_layer_norm_before=False)) == set(OPTIONAL_POINTS)
    assert refused("mistral.MistralDecoderLayer", layer(ada_rms_norm_t_cond=None)) == set()
    assert refused("mistral.MistralDecoderLayer", layer(ada_rms_norm_t_cond=nn.Linear(1, 1))) == {"mlp_in"}
    assert refused("gemma4.Gemma4DecoderLayer", layer(enable_moe_block=False)) == {"mlp_out"}
    assert refused("gemma4.Gemma4DecoderLayer", layer(enable_moe_block=True)) == {"mlp_in", "mlp_out"}


@pytest.mark.parametrize(("bias", "parallel", "left"), [(True, True, set()), (False, True, {"attn_out", "mlp_out"})])
def test_falcon_with_a_bias_adds_it_in_the_block(bias: bool, parallel: bool, left: set[str]) -> None:
    """Catches a branch without its bias."""
    made = layer(config=SimpleNamespace(bias=bias, new_decoder_architecture=False, parallel_attn=parallel))
    assert set(OPTIONAL_POINTS) - refused("falcon.FalconDecoderLayer", made) == left


def test_sums_over_ranks_that_come_later_are_refused_under_tensor_parallelism() -> None:
    """Catches an edit that every rank would add in full to its part of a sum."""
    assert refused("commandr.CohereDecoderLayer", layer()) == {"mlp_in"}
    assert refused("commandr.CohereDecoderLayer", layer(), tensor_parallel=True) == set(OPTIONAL_POINTS)
    assert refused("gpt_j.GPTJBlock", layer(), tensor_parallel=True) == {"mlp_in"}


def test_places() -> None:
    """Catches a branch in front of the norm that is behind it, and one module taken for another."""
    llama, step = BY_LAYER[f"{VLLM}llama.LlamaDecoderLayer"], BY_LAYER[f"{VLLM}step3p5.Step3p5DecoderLayer"]
    exaone = BY_LAYER[f"{VLLM}exaone4.Exaone4DecoderLayer"]
    norms = layer(post_attention_layernorm=nn.Linear(1, 1), post_feedforward_layernorm=nn.Linear(1, 1))
    assert [place_of(p, llama, layer()) for p in OPTIONAL_POINTS] == [SUMMAND, "post_attention_layernorm", SUMMAND]
    assert place_of("attn_out", exaone, norms) == "post_attention_layernorm"
    assert place_of("mlp_out", exaone, norms) == "post_feedforward_layernorm"
    assert place_of("mlp_out", step, layer()) == "mlp"
    assert place_of("mlp_out", step, layer(moe=nn.Linear(1, 1))) == "moe"
