# SPDX-License-Identifier: Apache-2.0
"""Find the decoder layers of a loaded model and the recipe of each.

Multimodal wrappers: only the language model is searched, never a tower. The container is the only ``ModuleList`` whose
length is the number of decoder layers; an index in it is the layer's number in the whole model. Under pipeline
parallelism the layers of other stages are placeholders in that list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from vllm_steer.compat.internals import PPMissingLayer, supports_multimodal
from vllm_steer.models.digests import why_unproven
from vllm_steer.models.recipe import MIXED_HEAD, Recipe, qualified_name
from vllm_steer.models.recipes import RECIPES, UNSUPPORTED
from vllm_steer.points import BRANCH_OUTPUTS, OPTIONAL_POINTS, PointName

ALLOW = "pass --steering-allow-unproven (SteeringConfig(allow_unproven=True))"
PROVE = "`vllm-steer doctor MODEL --allow-unproven --prove`"
"""Command that compares an unproven model with HF Transformers."""
_WITHOUT = "Start the engine without --enable-steering"
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm")
"""Final norms beside the list of decoder layers. The self-check compares the norm's output with the model's."""

_REFUSABLE: tuple[PointName, ...] = ("post_attn", *OPTIONAL_POINTS)


class UnsupportedModelError(ValueError):
    """Raised when a model cannot be steered; the message names the class and the reason."""


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer of this rank."""

    number: int
    """Place in the order in which layers run. A layer that runs several times has one number for each run."""
    module: nn.Module
    recipe: Recipe
    run: int = 0
    """Which run of the module this is, in a model that runs its layers several times per token."""

    def refusal(self, point: PointName, *, capturing: bool, tensor_parallel: bool) -> str | None:
        """Return why a point is refused on this layer, or None."""
        reason = self.recipe.refusal(point, capturing=capturing, tensor_parallel=tensor_parallel)
        return None if reason is None else reason.format(layer=type(self.module).__name__)


@dataclass(frozen=True)
class Decoder:
    """The decoder layers of this rank, and the number of layers of the whole model."""

    layers: tuple[DecoderLayer, ...]
    num_layers: int
    gaps: frozenset[tuple[PointName, int]] = frozenset()
    """Sites whose stream is not the one before plus the branches: ``pre_attn`` behind a skip or a new pass,
    ``post_attn`` of a layer that begins a new sum, and ``post_block`` behind a cross-attention."""
    recalls: frozenset[int] = frozenset()
    """Layers whose attention also reads what an earlier run cached, so their stream alone does not decide it."""
    mixed: frozenset[int] = frozenset()
    """Layers that also read other streams than the one of their points."""
    tensor_parallel: bool = False
    final_norm: nn.Module | None = None
    """The norm of the last layer's output; None if it is not known or on another pipeline stage."""
    unproven: tuple[str, ...] = ()
    """Reasons why layer classes are unproven, one sentence each; empty unless ``allow_unproven`` was given."""

    def refused(self, tensor_parallel: bool) -> dict[str, dict[str, str]]:
        """Return where edits are refused: ``{point: {layer number: reason}}``."""
        return self._refusals(False, tensor_parallel)

    def unread(self, tensor_parallel: bool) -> dict[str, dict[str, str]]:
        """Return where captures are refused, in the same form."""
        return self._refusals(True, tensor_parallel)

    def _refusals(self, capturing: bool, tensor_parallel: bool) -> dict[str, dict[str, str]]:
        return {
            point: {
                str(layer.number): reason
                for layer in self.layers
                if (reason := layer.refusal(point, capturing=capturing, tensor_parallel=tensor_parallel)) is not None
            }
            for point in _REFUSABLE
        }

    def recipes(self) -> list[dict[str, Any]]:
        """Return the recipes in use as builtins, each with the class and the numbers of its layers."""
        found: dict[tuple[str, str, str | None], list[int]] = {}
        for layer in self.layers:
            of_several = layer.recipe.stream and f"{layer.recipe.stream} of several"
            key = qualified_name(type(layer.module)), of_several or layer.recipe.shape, layer.recipe.post_attn
            found.setdefault(key, []).append(layer.number)
        return [{"layer": c, "stream": s, "mid": m, "layers": numbers} for (c, s, m), numbers in found.items()]

    def altered(self) -> dict[str, list[int]]:
        """Return the layers whose branch is another quantity than the output of attention or MLP, by point."""
        return {
            point: [layer.number for layer in self.layers if layer.recipe.is_altered(point)] for point in BRANCH_OUTPUTS
        }

    @property
    def mixed_head(self) -> str | None:
        """Reason why the head reads more than the last layer's stream; None if it does not, or on other stages."""
        last = self.layers[-1]
        if last.recipe.normed or last.number < self.num_layers - 1:
            return None
        return MIXED_HEAD.format(layer=type(last.module).__name__, stream=last.recipe.stream)

    @property
    def loops(self) -> bool:
        """Whether layers run several times per token."""
        return len({layer.module for layer in self.layers}) < len(self.layers)

    @property
    def layer_range(self) -> range:
        """Numbers of this rank's layers, which are consecutive on a pipeline stage."""
        numbers = [layer.number for layer in self.layers]
        return range(min(numbers), max(numbers) + 1)


def layer_count(hf_text_config: Any) -> int:
    """Return the number of decoder layers of a model.

    LongCat counts its attentions, two per layer, in ``num_hidden_layers`` and its layers in ``num_layers``.
    """
    hidden = int(hf_text_config.num_hidden_layers)
    layers = getattr(hf_text_config, "num_layers", None)
    return hidden // 2 if layers is not None and 2 * layers == hidden else hidden


def run_count(hf_text_config: Any) -> int:
    """Return the number of layers that requests name: runs of looped layers, and the decoder's beside an encoder.

    The scheduler has only the configuration; :func:`find_decoder` counts the modules.
    """
    speech = getattr(hf_text_config, "transf_decoder", None)
    if speech is not None:
        return int(speech["config_dict"]["num_layers"])
    for owner in (hf_text_config, getattr(hf_text_config, "decoder", None)):
        if (decoder_layers := getattr(owner, "decoder_layers", None)) is not None:
            return int(decoder_layers)
    if hasattr(hf_text_config, "H_cycles"):
        # Transformers counts the runs in ``num_hidden_layers``, checkpoints of other origin the layers.
        cycles = hf_text_config.H_cycles * (hf_text_config.L_cycles + 1)
        return int(hf_text_config.num_layers_per_stack * cycles)
    return layer_count(hf_text_config) * int(getattr(hf_text_config, "loop_num", 1))


def caches_behind_attention(hf_text_config: Any) -> bool:
    """Return whether the last layer's later points change cache entries, so that edits there need keys of their own.

    Inkling convolves the outputs of attention and MLP and caches them. Looped models are treated alike, although
    nothing reads what the last run leaves; they lose some hits.
    """
    return any(hasattr(hf_text_config, name) for name in ("sconv_kernel_size", "loop_num", "H_cycles"))


def find_decoder(model: nn.Module, hf_text_config: Any, *, allow_unproven: bool = False) -> Decoder:
    """Return all decoder layers of this rank with their recipes.

    Args:
        model: The loaded model, or one on the meta device.
        hf_text_config: The model's HF text configuration.
        allow_unproven: Accept classes whose source differs from the proven one, and subclasses of registered classes.

    Raises:
        UnsupportedModelError: The model cannot be steered.
    """

    def refuse(problem: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{type(model).__name__} cannot be steered{problem}")

    runs = _find_runs(model, hf_text_config, allow_unproven, refuse)
    num_layers = len(runs)
    if (counted := run_count(hf_text_config)) != num_layers:
        raise refuse(
            f": vLLM runs {num_layers} decoder layers, but config.json describes {counted}. Check num_hidden_layers "
            "and --hf-overrides; otherwise start without --enable-steering and report the architecture."
        )
    layers = []
    gaps: set[tuple[PointName, int]] = set()
    recalls: set[int] = set()
    mixed: set[int] = set()
    unproven: dict[str, None] = {}
    for number, (module, run) in enumerate(runs):
        if isinstance(module, PPMissingLayer):
            continue
        recipe = recipe_of(module, allow_unproven)
        name = qualified_name(type(module))
        if recipe is None:
            raise refuse(f": no recipe for layer {number}, {name}.{_override_hint([module])} {_WITHOUT}.")
        if (doubt := why_unproven(type(module))) is not None:
            if not allow_unproven:
                raise refuse(
                    f": {doubt}, so its hook points may be elsewhere. Install a proven version, or check this one with "
                    f"{PROVE} and {ALLOW}."
                )
            unproven[doubt] = None
        if (reason := recipe.why_unsupported(module)) is not None:
            raise refuse(f": {name} is not supported with {reason}.")
        own = recipe.of(module)
        layers.append(DecoderLayer(number, module, own, run))
        if recipe.recalls and run:
            recalls.add(number)
        if own.mixed:
            mixed.add(number)
        if own.restarts:
            gaps.add(("post_attn", number))
        if recipe.cross_attention:
            gaps.add(("post_block", number))
        if number in recipe.gaps(hf_text_config):
            gaps.add(("pre_attn", number))
    return Decoder(
        tuple(layers), num_layers, frozenset(gaps), frozenset(recalls), frozenset(mixed), unproven=tuple(unproven)
    )


def _find_runs(
    model: nn.Module, config: Any, allow_unproven: bool, refuse: Callable[[str], UnsupportedModelError]
) -> Sequence[tuple[nn.Module, int]]:
    """Return the decoder layers in the order in which they run, each with its pass, 0 in models without a loop."""
    root: Any = model.get_language_model() if supports_multimodal(model) else model  # type: ignore[operator]
    for module in root.modules():
        recipe = recipe_of(module, allow_unproven)
        if recipe is not None and recipe.runs is not None:
            return recipe.runs(root, config)
    return [(layer, 0) for layer in _find_layers(model, run_count(config), allow_unproven, refuse)]


def _find_layers(
    model: nn.Module, num_layers: int, allow_unproven: bool, refuse: Callable[[str], UnsupportedModelError]
) -> nn.ModuleList:
    """Return the list of decoder layers."""
    root: Any = model.get_language_model() if supports_multimodal(model) else model  # type: ignore[operator]
    candidates = [
        module for module in root.modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    # Some models keep the same layers in two lists.
    known = {
        tuple(map(id, candidate)): candidate
        for candidate in candidates
        if any(recipe_of(layer, allow_unproven) for layer in candidate)
    }
    if len(known) > 1:
        raise refuse(f": {len(known)} lists of {num_layers} decoder layers found, expected one. {_WITHOUT}.")
    for found in known.values():
        return found
    classes = {qualified_name(type(module)) for module in root.modules()}
    for unsupported, why in UNSUPPORTED.items():
        if unsupported in classes:
            raise refuse(f" ({unsupported.rpartition('.')[2]}): {why}. {_WITHOUT}.")
    layers = [layer for candidate in candidates for layer in candidate]
    names = ", ".join(sorted({qualified_name(type(layer)) for layer in layers}))
    raise refuse(
        f": no recipe for its decoder layers ({names or f'no list of {num_layers} layers found'})"
        f".{_override_hint(layers)} {_WITHOUT}, or use another model: docs/reference/architectures.md lists them, and "
        "`vllm-steer doctor MODEL` checks one from its config.json alone."
    )


def recipe_of(layer: nn.Module, allow_unproven: bool) -> Recipe | None:
    """Return the recipe of a layer's class; with ``allow_unproven``, base classes count too."""
    classes = type(layer).__mro__ if allow_unproven else (type(layer),)
    return next((RECIPES[name] for name in map(qualified_name, classes) if name in RECIPES), None)


def _override_hint(layers: Iterable[nn.Module]) -> str:
    """Return the hint to ``allow_unproven`` if a base class of a layer has a recipe."""
    bases = sorted({recipe.layer_class for layer in layers if (recipe := recipe_of(layer, True)) is not None})
    return (
        f" It derives from {', '.join(bases)}: to use that recipe, check it with {PROVE} and {ALLOW}." if bases else ""
    )


def find_final_norm(model: nn.Module, decoder: Decoder) -> nn.Module | None:
    """Return the module that norms the stream of the last decoder layer; None if no single module has a known name."""
    if not decoder.layers[-1].recipe.normed:
        return None
    last = decoder.layers[-1].module
    for parent in model.modules():
        if any(isinstance(each, nn.ModuleList) and any(layer is last for layer in each) for each in parent.children()):
            norms = [getattr(parent, name, None) for name in _NORMS]
            # A placeholder marks the norm of another pipeline stage.
            found = [norm for norm in norms if isinstance(norm, nn.Module) and not isinstance(norm, PPMissingLayer)]
            return found[0] if len(found) == 1 else None
    return None
