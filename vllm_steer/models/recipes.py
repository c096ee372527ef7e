# SPDX-License-Identifier: Apache-2.0
"""All recipes, by decoder-layer class.

A class without a recipe is refused when the engine starts: a tap in the wrong place gives fluent, wrong answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from vllm_steer.models.recipe import Recipe
from vllm_steer.models.transformers_recipes import TRANSFORMERS_RECIPES
from vllm_steer.models.vllm_recipes import VLLM_RECIPES

_ROWS: Final = {recipe.layer_class: recipe for recipe in (*VLLM_RECIPES, *TRANSFORMERS_RECIPES)}

RECIPES: Final[Mapping[str, Recipe]] = {
    name: replace(_ROWS[row.inherits], layer_class=name, inherits=row.inherits) if row.inherits else row
    for name, row in _ROWS.items()
}
"""Recipes by the qualified name of the class."""
PROVEN: Final = frozenset(name for name, recipe in RECIPES.items() if recipe.proven)
"""Qualified names of the classes whose recipe is proven."""
