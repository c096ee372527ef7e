# SPDX-License-Identifier: Apache-2.0
"""The tables of decoder layers: nothing is served that is not proven, nothing is both served and refused."""

from __future__ import annotations

import ast
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import architectures
import pytest
import vllm
from torch import nn

from tests.conformance.inventory import inventory
from tests.conformance.no_reference import NO_REFERENCE
from tests.conformance.zoo import ZOO
from vllm_steer.models.layers import AWAITING, INHERITED
from vllm_steer.models.recipes import BY_LAYER, PROVEN, RECIPES, Recipe
from vllm_steer.models.refused import REFUSED

MINIMUM = 140
"""Architectures that have to stay proven."""


def test_every_class_is_proven_or_awaits_its_proof() -> None:
    """Catches a recipe that was added without a proof, one whose proof failed in the last run, and one that is refused
    though it has been proven."""
    proven = architectures.load().layers
    assert {layer.rsplit(".", 1)[1] for layer in PROVEN} <= proven
    assert not {layer.rsplit(".", 1)[1] for layer in AWAITING} & proven


def test_classes_are_named_once() -> None:
    """Catches a second recipe that replaces the first, and a class that is served and refused."""
    assert len(BY_LAYER) == len(RECIPES)
    assert not BY_LAYER.keys() & REFUSED.keys()


def test_every_architecture_of_the_registry_has_a_status() -> None:
    """Catches an architecture that a new version of vLLM adds and nobody looked at."""
    results = architectures.load()
    now = [asdict(entry) for entry in inventory()]
    assert [entry["architecture"] for entry in now] == [entry["architecture"] for entry in results.registry]
    statuses = [architectures.status(entry, results)[0] for entry in results.registry]
    beyond = set(results.rows) - {entry["architecture"] for entry in results.registry}
    assert statuses.count(architectures.PROVEN) + len(beyond) >= MINIMUM


def test_every_row_is_in_the_results() -> None:
    """Catches a row that the table would be silent about."""
    rows = {row["row"]: row for row in architectures.load().about["rows"]}
    wanted = {tiny.name for tiny in (*ZOO, *NO_REFERENCE) if not tiny.gpu_only}
    assert rows.keys() == wanted
    assert not [name for name, row in rows.items() if "problem" in row]


def test_inherited_forwards() -> None:
    """Catches a class that has got a forward of its own since."""
    root = Path(vllm.__file__).parent / "model_executor" / "models"
    for layer, base in INHERITED.items():
        module, name = layer.split(".")
        tree = ast.parse((root / f"{module}.py").read_text())
        cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        assert [ast.unparse(node) for node in cls.bases] == [base.split(".")[1]]
        assert "forward" not in {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.layer.rpartition(".")[2])
def test_a_point_is_edited_or_the_reason_names_the_layer(recipe: Recipe) -> None:
    """Catches a row without a tap at ``post_attn`` that would accept edits there and make none."""
    reason = recipe.not_edited(nn.Linear(1, 1))
    assert (reason is None) == (recipe.mid is not None)
    assert reason is None or "Linear" in reason


def test_a_branch_that_is_a_part_of_a_sum_is_not_read_under_tensor_parallelism() -> None:
    """Catches rows that hold one rank's share of the attention, which have the right shape and are wrong."""
    refused = {
        recipe.layer.rpartition(".")[2]
        for recipe in RECIPES
        if recipe.not_read(nn.Linear(1, 1), False) is None and recipe.not_read(nn.Linear(1, 1), True) is not None
    }
    assert refused >= {"FalconDecoderLayer", "CohereDecoderLayer"}
    assert refused <= {recipe.layer.rpartition(".")[2] for recipe in RECIPES if recipe.mid is None}


def test_what_has_neither_a_norm_nor_a_branch_is_not_read() -> None:
    """Catches reads that no tap answers."""
    recipe = Recipe("Block", "single", None, "no place in {layer}")
    assert recipe.not_read(nn.Linear(1, 1), False) == "no place in Linear"
