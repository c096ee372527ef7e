# SPDX-License-Identifier: Apache-2.0
"""Finding a model's decoder layers, and the recipe of each.

The language model of a multimodal wrapper is searched, never a tower. The container is the one ``ModuleList`` as long
as the text model has layers; its index is the layer's number over the whole model, also under pipeline parallelism,
where other stages' layers are placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from vllm.model_executor.models.interfaces import supports_multimodal
from vllm.model_executor.models.utils import PPMissingLayer

from vllm_steer.models.branches import not_served
from vllm_steer.models.digests import why_unproven
from vllm_steer.models.layers import layer_count
from vllm_steer.models.recipes import BY_LAYER, Recipe, qualified_class, qualified_name
from vllm_steer.models.refused import REFUSED
from vllm_steer.points import OPTIONAL_POINTS

ALLOW = "pass --steering-allow-unproven (SteeringConfig(allow_unproven=True))"


class UnsupportedModelError(ValueError):
    """This model cannot be steered; the message names the class and what is missing."""


@dataclass(frozen=True)
class Site:
    """One decoder layer of this rank."""

    number: int
    layer: nn.Module
    recipe: Recipe


@dataclass(frozen=True)
class Decoder:
    """The decoder layers of this rank, and how many the whole model has."""

    sites: tuple[Site, ...]
    num_layers: int
    unproven: tuple[str, ...] = ()
    """Why classes that are steered all the same were not proven, a sentence each; empty unless the user allows it."""

    def refused(self, tensor_parallel: bool) -> dict[str, dict[str, str]]:
        """Where edits are refused: ``{point: {layer number: reason}}``; what is not named is served, in an engine that
        has the point."""
        return {
            "post_attn": self._reasons(lambda site: site.recipe.not_edited(site.layer)),
            **self._branches(tensor_parallel),
        }

    def unread(self, tensor_parallel: bool) -> dict[str, dict[str, str]]:
        """Where reads are refused, in the same form."""
        return {
            "post_attn": self._reasons(lambda site: site.recipe.not_read(site.layer, tensor_parallel)),
            **self._branches(tensor_parallel),
        }

    def _branches(self, tensor_parallel: bool) -> dict[str, dict[str, str]]:
        return {
            point: self._reasons(lambda site, point=point: not_served(point, site.recipe, site.layer, tensor_parallel))  # type: ignore[misc]
            for point in OPTIONAL_POINTS
        }

    def _reasons(self, why: Callable[[Site], str | None]) -> dict[str, str]:
        reasons = ((str(site.number), why(site)) for site in self.sites)
        return {number: reason for number, reason in reasons if reason is not None}

    def recipes(self) -> list[dict[str, Any]]:
        """The recipes in use, each with the class and the numbers of its layers, in builtins."""
        found: dict[tuple[str, str, str | None], list[int]] = {}
        for site in self.sites:
            found.setdefault((qualified_name(site.layer), site.recipe.shape, site.recipe.mid), []).append(site.number)
        return [{"layer": c, "stream": s, "mid": m, "layers": numbers} for (c, s, m), numbers in found.items()]

    @property
    def own_layers(self) -> range:
        """The numbers of this rank's layers: a pipeline stage has neighbouring ones."""
        numbers = [site.number for site in self.sites]
        return range(min(numbers), max(numbers) + 1)


def find_decoder(model: nn.Module, hf_text_config: Any, *, allow_unproven: bool = False) -> Decoder:
    """All decoder layers with their recipes; raises :class:`UnsupportedModelError`.

    ``allow_unproven``: take a class whose source is not the proven one, or a subclass of a class with a recipe.
    """
    name = type(model).__name__
    root: Any = model.get_language_model() if supports_multimodal(model) else model  # type: ignore[operator]
    num_layers = layer_count(hf_text_config)
    containers = [
        module for module in root.modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    # One per list of layers: some models keep the same layers in two lists.
    known = list(
        {
            tuple(map(id, container)): container
            for container in containers
            if any(recipe_of(layer, allow_unproven) for layer in container)
        }.values()
    )
    if len(known) != 1:
        seen = sorted({qualified_name(layer) for container in containers for layer in container})
        modules = {qualified_name(module) for module in root.modules()}
        for refused, why in REFUSED.items():
            if refused in modules and not known:
                raise UnsupportedModelError(f"{name} cannot be steered ({refused.rsplit('.', 1)[1]}): {why}")
        raise UnsupportedModelError(
            f"{name} cannot be steered: no recipe for its decoder layers"
            + (f" ({', '.join(seen)})" if seen else f" (no list of {num_layers} layers found)")
            + _how_to_allow([layer for container in containers for layer in container])
            + ". Start it without --enable-steering, or see docs/reference/architectures.md for those that are proven."
            if not known
            else f"{name} cannot be steered: {len(known)} lists of {num_layers} decoder layers found, expected one"
        )
    sites = []
    doubts: dict[str, None] = {}
    for number, layer in enumerate(known[0]):
        if isinstance(layer, PPMissingLayer):
            continue
        recipe = recipe_of(layer, allow_unproven)
        if recipe is None:
            raise UnsupportedModelError(
                f"{name} cannot be steered: no recipe for layer {number}, {qualified_name(layer)}"
                + _how_to_allow([layer])
            )
        doubt = why_unproven(type(layer))
        if doubt is not None and not allow_unproven:
            raise UnsupportedModelError(
                f"{name} cannot be steered: {doubt}, and in other code hook points may be in other places. Install a "
                f"version that is proven, or {ALLOW} to run on a recipe that nobody has proven."
            )
        if doubt is not None:
            doubts[doubt] = None
        reason = recipe.accepts(layer)
        if reason is not None:
            raise UnsupportedModelError(f"{name} cannot be steered: {qualified_name(layer)} with {reason}")
        sites.append(Site(number, layer, recipe.of(layer)))
    return Decoder(tuple(sites), num_layers, tuple(doubts))


def recipe_of(layer: nn.Module, allow_unproven: bool) -> Recipe | None:
    """The recipe of a layer's class; where unproven ones are allowed, else that of its nearest base class."""
    classes = type(layer).__mro__ if allow_unproven else (type(layer),)
    return next((BY_LAYER[name] for name in map(qualified_class, classes) if name in BY_LAYER), None)


def _how_to_allow(layers: Iterable[nn.Module]) -> str:
    """Where the override would help: for a layer whose base class has a recipe."""
    bases = sorted({recipe.layer for recipe in (recipe_of(layer, True) for layer in layers) if recipe is not None})
    return f" (derived from {', '.join(bases)}: {ALLOW} to use its recipe unproven)" if bases else ""
