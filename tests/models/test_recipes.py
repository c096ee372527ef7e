# SPDX-License-Identifier: Apache-2.0
"""Recipes: every class is registered once and proven, every point has a location or a reason."""

from __future__ import annotations

import ast
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import architectures
import pytest
from torch import nn

from tests.conformance.branches import supported_branches
from tests.conformance.inventory import ROOT, inventory
from tests.conformance.no_reference import NO_REFERENCE
from tests.conformance.zoo import ZOO
from vllm_steer.models.recipe import PARALLEL, SUMMAND, Recipe
from vllm_steer.models.recipes import PROVEN, RECIPES, TRANSFORMERS_RECIPES, UNSUPPORTED
from vllm_steer.models.vllm_recipes import MODULES, VLLM_RECIPES
from vllm_steer.points import BRANCH_OUTPUTS, OPTIONAL_POINTS

MIN_PROVEN = 169
"""Architectures that must stay proven."""
SETTINGS_REFUSE = {
    "decilm_no_ops", "falcon", "falcon_new", "falcon_rw", "gemma4", "gemma4_wrapper", "gpt_neox_seq", "opt_post_ln",
    "qwen3_5moe_wrapper",
}  # fmt: skip
"""Models whose settings, not their class, decide which points on the branches they serve."""


def layer(**settings: Any) -> Any:
    """Return a layer with these settings that has every submodule."""
    made = nn.Module()
    for name in ("self_attn", "mlp", "fc2"):
        setattr(made, name, nn.Linear(1, 1))
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def refused(name: str, module: Any, tensor_parallel: bool = False) -> set[str]:
    recipe = RECIPES[MODULES + name].of(module)
    return {p for p in OPTIONAL_POINTS if recipe.refusal(p, tensor_parallel=tensor_parallel) is not None}


def short(name: str) -> str:
    return name.rpartition(".")[2]


def source_of(name: str) -> Path:
    """Return the file of a class, which older versions of vLLM may lack."""
    return ROOT.joinpath(*name.split(".")[:-1]).with_suffix(".py")


def test_every_recipe_is_proven() -> None:
    """Catches a recipe that was added without a proof, or that is marked unproven although a proof exists."""
    proven = architectures.load().layers
    assert {short(name) for name in PROVEN} <= proven
    assert not {short(name) for name in RECIPES.keys() - PROVEN} & proven


def test_classes_are_registered_once() -> None:
    """Catches a second row that replaces the first, and a class that is both supported and unsupported."""
    assert len(RECIPES) == len(VLLM_RECIPES) + len(TRANSFORMERS_RECIPES)
    assert not RECIPES.keys() & UNSUPPORTED.keys()


@pytest.mark.slow
def test_every_registered_architecture_has_a_status() -> None:
    """Catches an architecture that a new version of vLLM adds and that the results do not know."""
    results = architectures.load()
    now = [asdict(entry) for entry in inventory()]
    assert [entry["architecture"] for entry in now] == [entry["architecture"] for entry in results.registry]
    statuses = [architectures.status(entry, results)[0] for entry in results.registry]
    beyond = set(results.rows) - {entry["architecture"] for entry in results.registry}
    assert statuses.count(architectures.PROVEN) + len(beyond) >= MIN_PROVEN


def test_results_have_every_row() -> None:
    """Catches a row that is missing from the page of architectures."""
    rows = {row["row"]: row for row in architectures.load().about["rows"]}
    assert rows.keys() == {tiny.name for tiny in (*ZOO, *NO_REFERENCE) if not tiny.gpu_only}
    assert not [name for name, row in rows.items() if "problem" in row]


def test_inherited_forward_is_the_base_classes() -> None:
    """Catches a derived class that a new version of vLLM gives a ``forward`` of its own."""
    for name, recipe in RECIPES.items():
        if not recipe.inherits:
            continue
        # Not by import: packages of models for GPUs cannot be imported everywhere.
        tree = ast.parse(source_of(name).read_text())
        cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == short(name))
        assert [ast.unparse(base) for base in cls.bases] == [short(recipe.inherits)]
        assert "forward" not in {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}


def test_each_point_has_a_location_or_a_reason() -> None:
    """Catches a class whose point is accepted and tapped nowhere, and a refusal that does not name the class."""
    for recipe in RECIPES.values():
        for point in ("post_attn", *OPTIONAL_POINTS):
            reason = recipe.refusal(point)
            if reason is not None:
                assert "{layer}" in reason, recipe.layer_class
            elif point in ("post_attn", "mlp_in"):
                assert recipe.post_attn is not None
                assert point == "post_attn" or recipe.post_attn != "mlp"
            else:
                assert recipe.shape == "pair" or (recipe.attn_out if point == "attn_out" else recipe.mlp_out)


def test_submodules_are_named_for_single_tensors_only() -> None:
    """Catches a row that names the branches of a pair, which are taken from the summand instead."""
    assert all(r.shape == "single" for r in RECIPES.values() if r.attn_out or r.mlp_out)


@pytest.mark.parametrize("tiny", [*ZOO, *NO_REFERENCE], ids=str)
def test_served_branches_are_the_proven_ones(tiny: Any) -> None:
    """Catches a class that serves a point which no conformance model proves, and a proven point that is refused."""
    by_name = {short(name): recipe for name, recipe in RECIPES.items()}
    supported = {p for p in OPTIONAL_POINTS if all(by_name[name].refusal(p) is None for name in tiny.layers)}
    assert (supported == set(supported_branches(tiny))) == (tiny.name not in SETTINGS_REFUSE)


def test_settings_refuse_points() -> None:
    """Catches a variant whose branches are not what the stream grows by."""
    assert refused("opt.OPTDecoderLayer", layer(do_layer_norm_before=True)) == set()
    assert refused("opt.OPTDecoderLayer", layer(do_layer_norm_before=False)) == set(OPTIONAL_POINTS)
    assert refused("mistral.MistralDecoderLayer", layer(ada_rms_norm_t_cond=None)) == set()
    assert refused("mistral.MistralDecoderLayer", layer(ada_rms_norm_t_cond=nn.Linear(1, 1))) == {"mlp_in"}
    assert refused("gemma4.Gemma4DecoderLayer", layer(enable_moe_block=False)) == {"mlp_out"}
    assert refused("gemma4.Gemma4DecoderLayer", layer(enable_moe_block=True)) == {"mlp_in", "mlp_out"}


@pytest.mark.parametrize(
    ("bias", "parallel", "supported"), [(True, True, set()), (False, True, {"attn_out", "mlp_out"})]
)
def test_falcon_with_bias_refuses_branches(bias: bool, parallel: bool, supported: set[str]) -> None:
    """Catches a branch without its bias, which Falcon adds in the block."""
    module = layer(config=SimpleNamespace(bias=bias, new_decoder_architecture=False, parallel_attn=parallel))
    assert set(OPTIONAL_POINTS) - refused("falcon.FalconDecoderLayer", module) == supported


def test_partial_branches_are_refused_under_tensor_parallelism() -> None:
    """Catches an edit that every rank would add in full to its part of a sum."""
    assert refused("commandr.CohereDecoderLayer", layer()) == {"mlp_in"}
    assert refused("commandr.CohereDecoderLayer", layer(), tensor_parallel=True) == set(OPTIONAL_POINTS)
    assert refused("gpt_j.GPTJBlock", layer(), tensor_parallel=True) == {"mlp_in"}


def test_partial_streams_are_not_read_under_tensor_parallelism() -> None:
    """Catches rows that hold one rank's share of the attention: their shape is right and their values are wrong."""
    partial = {
        short(recipe.layer_class)
        for recipe in RECIPES.values()
        if recipe.refusal("post_attn", capturing=True) is None
        and recipe.refusal("post_attn", capturing=True, tensor_parallel=True) is not None
    }
    assert partial == {"FalconDecoderLayer", "CohereDecoderLayer"}


def test_parallel_block_without_attention_output_is_not_read() -> None:
    """Catches reads that no tap answers."""
    assert Recipe("Block", "single", None).refusal("post_attn", capturing=True) == PARALLEL


def test_locations() -> None:
    """Catches a branch that is read before its post-norm instead of after it, and the wrong one of two modules."""
    llama, step = RECIPES[f"{MODULES}llama.LlamaDecoderLayer"], RECIPES[f"{MODULES}step3p5.Step3p5DecoderLayer"]
    exaone = RECIPES[f"{MODULES}exaone4.Exaone4DecoderLayer"]
    norms = layer(post_attention_layernorm=nn.Linear(1, 1), post_feedforward_layernorm=nn.Linear(1, 1))
    assert [llama.location(p, layer()) for p in OPTIONAL_POINTS] == [SUMMAND, "post_attention_layernorm", SUMMAND]
    assert exaone.location("attn_out", norms) == "post_attention_layernorm"
    assert exaone.location("mlp_out", norms) == "post_feedforward_layernorm"
    assert step.location("mlp_out", layer()) == "mlp"
    assert step.location("mlp_out", layer(moe=nn.Linear(1, 1))) == "moe"


def norms_behind_branches(name: str) -> set[str]:
    """Return the branches that a norm follows in the ``forward`` of a class whose stream is a pair."""
    recipe = RECIPES[name]
    tree = ast.parse(source_of(recipe.inherits or name).read_text())
    cls = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == short(recipe.inherits or name))
    forward = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    calls = [node for body in forward for node in ast.walk(body) if isinstance(node, ast.Call)]
    # The norm in front of attention is called with one argument in the first layer.
    first = [node for body in forward for node in ast.walk(body) if isinstance(node, ast.If)]
    skipped = {id(call) for each in first if "residual is" in ast.unparse(each.test) for call in ast.walk(each)}
    norms = [
        call
        for call in calls
        if id(call) not in skipped
        and "norm" in ast.unparse(call.func)
        and [isinstance(each, ast.Call) or ast.unparse(each) == "hidden_states" for each in call.args] == [True]
    ]
    mlps = [
        call.lineno
        for call in calls
        if ast.unparse(call.func).rpartition(".")[2] in ("mlp", "feed_forward", "feedforward")
    ]
    return {"mlp_out" if mlps and call.lineno >= min(mlps) else "attn_out" for call in norms}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, recipe in RECIPES.items()
        if recipe.shape == "pair" and name.startswith(MODULES) and source_of(name).exists()
    ],
)
def test_norms_behind_branches_are_in_the_recipe(name: str) -> None:
    """Catches a pair whose branch is taken for the output of attention or MLP although a norm follows."""
    every_setting = SimpleNamespace(
        is_layer_sparse=True, sandwich_norm=True, layer_scale=False, use_moe=False, self_attn=1, mlp=1
    )
    recipe = RECIPES[name].of(every_setting)  # type: ignore[arg-type]
    known = {point for point in BRANCH_OUTPUTS if recipe.is_altered(point)}
    # Its MLP is the sum of two.
    assert known - ({"mlp_out"} if "Mobius" in name else set()) == norms_behind_branches(name)


@pytest.mark.parametrize("tiny", [tiny for tiny in ZOO if tiny.no_parity is None], ids=str)
def test_norms_behind_attention_are_those_of_the_reference(tiny: Any) -> None:
    """Catches a class whose attention branch is said to be the output of attention, but is a norm's in HF's model."""
    by_name = {short(name): recipe for name, recipe in RECIPES.items()}
    for name in tiny.layers:
        recipe = by_name[name]
        # HF's modules of the first two return the sum with the stream; settings decide for the third.
        if recipe.refusal("attn_out") is None and name not in ("BloomBlock", "DbrxBlock", "OpenPanguDecoderLayer"):
            assert recipe.is_altered("attn_out") == ("norm" in tiny.branch.rpartition(".")[2])


def test_settings_alter_branches() -> None:
    """Catches a branch that a layer scales, or adds to another, taken for the output of attention or MLP."""

    def altered(name: str, **settings: Any) -> list[str]:
        recipe = RECIPES[MODULES + name].of(layer(**settings))
        return [point for point in BRANCH_OUTPUTS if recipe.is_altered(point)]

    for name in ("qwen3_next.Qwen3NextDecoderLayer", "qwen3_5.Qwen3_5DecoderLayer"):
        assert altered(name, layer_scale=False) == []
        assert altered(name, layer_scale=True) == list(BRANCH_OUTPUTS)
    assert altered("interns2_mobius.InternS2MobiusDecoderLayer", layer_scale=False) == ["mlp_out"]
    assert altered("step3_text.Step3TextDecoderLayer", use_moe=True) == ["mlp_out"]
    assert altered("bloom.BloomBlock") == list(BRANCH_OUTPUTS)  # HF's modules return the sum with the stream
    assert altered("dbrx.DbrxBlock") == ["attn_out"]
    assert altered("llama.LlamaDecoderLayer") == []
