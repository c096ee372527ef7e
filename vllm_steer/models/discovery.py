# SPDX-License-Identifier: Apache-2.0
"""Finding a model's decoder layers, and the recipe of each.

The language model of a multimodal wrapper is searched, never a tower. The container is the one ``ModuleList`` as long
as the text model has layers; its index is the layer's number over the whole model, also under pipeline parallelism,
where other stages' layers are placeholders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from vllm.model_executor.models.interfaces import supports_multimodal
from vllm.model_executor.models.utils import PPMissingLayer

from vllm_steer.models.recipes import BY_LAYER, Recipe, qualified_name


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


def find_decoder(model: nn.Module, hf_text_config: Any) -> Decoder:
    """All decoder layers with their recipes; raises :class:`UnsupportedModelError`."""
    name = type(model).__name__
    root: Any = model.get_language_model() if supports_multimodal(model) else model  # type: ignore[operator]
    num_layers = int(hf_text_config.num_hidden_layers)
    containers = [
        module for module in root.modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    known = [container for container in containers if any(qualified_name(layer) in BY_LAYER for layer in container)]
    if len(known) != 1:
        seen = sorted({qualified_name(layer) for container in containers for layer in container})
        raise UnsupportedModelError(
            f"{name} cannot be steered: no recipe for its decoder layers"
            + (f" ({', '.join(seen)})" if seen else f" (no list of {num_layers} layers found)")
            + ". Start it without --enable-steering, or see docs/reference/models.md for the models that are proven."
            if not known
            else f"{name} cannot be steered: {len(known)} lists of {num_layers} decoder layers found, expected one"
        )
    sites = []
    for number, layer in enumerate(known[0]):
        if isinstance(layer, PPMissingLayer):
            continue
        recipe = BY_LAYER.get(qualified_name(layer))
        if recipe is None:
            raise UnsupportedModelError(
                f"{name} cannot be steered: no recipe for layer {number}, {qualified_name(layer)}"
            )
        reason = recipe.accepts(layer)
        if reason is not None:
            raise UnsupportedModelError(f"{name} cannot be steered: {qualified_name(layer)} with {reason}")
        sites.append(Site(number, layer, recipe))
    return Decoder(tuple(sites), num_layers)
