# SPDX-License-Identifier: Apache-2.0
"""Helper table: the ways in which taps are installed on the layers of a row, derived from the recipes.

Rows with the same way share their negative controls: a wrong tap in one is a wrong tap in the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tests.conformance.model import TinyModel
from vllm_steer.models.recipe import BLOCK_INPUT, BLOCK_OUTPUT, MLP_MIX, Recipe
from vllm_steer.models.recipes import RECIPES


@dataclass(frozen=True)
class Way:
    """Fields that determine where ``install.py`` puts the taps of a layer and which checks compare them.

    ``family`` and ``dtype`` come from the row, the other fields from the recipe. ``installer`` and ``variant`` are
    names of functions, ``post_attn`` is the kind of location. ``no_ops``: some of the blocks lack a branch, so the
    variant moves their ``post_attn``. ``gaps``: some layers do not read what the layer before them leaves.
    """

    family: str
    dtype: str
    shape: str
    post_attn: str
    installer: str
    reduced_by: str
    residual_at: int
    pass_argument: str
    variant: str
    cross_attention: bool
    no_ops: bool
    gaps: bool

    @property
    def hows(self) -> set[str]:
        """Controls that the way must have; empty for custom installers, of which any one control suffices."""
        if self.installer or self.family == "ATTENTION-RESIDUALS":
            return set()
        return {"late", "half"} if self.shape == "pair" or self.post_attn == "parallel" else {"late"}


def ways(tiny: TinyModel, recipes: Mapping[str, Recipe] = RECIPES) -> set[Way]:
    """Return the ways of a row's layer classes; raise KeyError for a class without a recipe."""
    return {_way(tiny, recipe_of(tiny, layer, recipes.values())) for layer in tiny.layers}


def recipe_of(tiny: TinyModel, layer: str, recipes: Iterable[Recipe]) -> Recipe:
    """Return the recipe of a class by its short name, which classes of other platforms and of Transformers share."""
    found = [recipe for recipe in recipes if recipe.layer_class.rpartition(".")[2] == layer]
    if not found:
        raise KeyError(layer)
    module = (tiny.model_class or "").partition(":")[0]
    return min(
        found, key=lambda recipe: (recipe.layer_class != f"{module}.{layer}", "transformers." in recipe.layer_class)
    )


def _way(tiny: TinyModel, recipe: Recipe) -> Way:
    kinds = {None: "no tensor", BLOCK_INPUT: BLOCK_INPUT, BLOCK_OUTPUT: BLOCK_OUTPUT, MLP_MIX: MLP_MIX}
    variant = recipe.variant.__name__
    return Way(
        family=tiny.recipe,
        dtype=tiny.dtype,
        shape=recipe.shape,
        post_attn="parallel" if recipe.parallel else kinds.get(recipe.post_attn, "a submodule"),
        installer="" if recipe.install is None else recipe.install.__name__,
        reduced_by=recipe.reduced_by,
        residual_at=recipe.residual_at,
        pass_argument=recipe.pass_argument,
        variant="" if variant == "<lambda>" else variant,
        cross_attention=recipe.cross_attention,
        no_ops=bool(tiny.mlp_blocks) and not tiny.one_branch,
        gaps=bool(tiny.gaps),
    )
