# SPDX-License-Identifier: Apache-2.0
"""Arguments of a study and of a sweep, checked as far as they do not depend on the prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from vllm_steer.errors import SteeringError
from vllm_steer.patching.axes import Span, read_layers, read_points, read_window, windows
from vllm_steer.patching.header import Direction
from vllm_steer.patching.metrics import CustomMetric, read_metric
from vllm_steer.patching.prompts import Pair
from vllm_steer.patching.runner import MAX_SCORED, Runner
from vllm_steer.patching.sources import Subspaces, random_subspaces
from vllm_steer.points import PointName
from vllm_steer.request.matrix import SUBSPACE, Matrix, is_matrix, parse_matrix, parse_subspace
from vllm_steer.request.scalars import is_integer, read_choice, read_number, shown

Ablation = Literal["zero", "mean", "resample"]
ABLATIONS: tuple[Ablation, ...] = get_args(Ablation)
DIRECTIONS: tuple[Direction, ...] = ("denoising", "noising")
"""Directions that can be chosen; studies with ``ablate`` have only one."""
NOISE_DRAWS = 10
"""Default number of draws of the noise."""
MAX_NOISE = 1e6
"""Largest standard deviation of the noise, in deviations of the embeddings."""
MAX_DRAWS = 1000


@dataclass(frozen=True)
class Corruption:
    """How the clean run is corrupted, if not by another prompt of the pair."""

    noise: float | None = None
    """Standard deviation of the noise, in standard deviations of the embeddings."""
    subject: Any = None
    """Where the noise is added."""
    ablate: Ablation | None = None
    reference: Any = None
    """Prompts from which the rows of mean and resample ablation come; None for the clean prompts of the pairs."""
    draws: int = 1
    seed: int = 0
    """Seed of the draws, and of the random subspaces of the control."""

    @property
    def description(self) -> str:
        """The corruption as text."""
        if self.ablate is not None:
            more = f", {self.draws} draws, seed {self.seed}" if self.ablate == "resample" else ""
            return f"{self.ablate} ablation{more}"
        if self.noise is not None:
            return f"noise of {self.noise:g} embedding deviations, {self.draws} draws, seed {self.seed}"
        return "corrupt prompt"


def read_corruption(
    *, has_corrupt: bool, noise: object, subject: object, draws: object, ablate: object, reference: object, seed: object
) -> Corruption:
    """Return the corruption of a study.

    Raises:
        SteeringError: None or several corruptions are given, or an argument is invalid or has no effect.
    """
    given = [
        name for name, there in (("corrupt", has_corrupt), ("noise", noise is not None), ("ablate", ablate is not None))
        if there
    ]  # fmt: skip
    if len(given) != 1:
        found = f"got {' and '.join(given)}" if given else "got none"
        raise SteeringError("corrupt", f"give exactly one of corrupt, noise and ablate; {found}")
    if not is_integer(seed) or seed < 0:
        raise SteeringError("seed", f"must be an integer from 0, not {shown(seed)}")
    if draws is not None and (not is_integer(draws) or not 1 <= draws <= MAX_DRAWS):
        raise SteeringError("draws", f"must be an integer from 1 to {MAX_DRAWS}, not {shown(draws)}")
    if (noise is None) != (subject is None):
        missing = "subject" if subject is None else "noise"
        raise SteeringError(missing, "noise and subject belong together; give both or none")
    if ablate is None and reference is not None:
        raise SteeringError("reference", "has no effect without ablate; leave it out")
    if ablate is not None:
        name = read_choice(ablate, ABLATIONS, "ablate", what="an ablation")
        if name == "zero" and reference is not None:
            raise SteeringError("reference", "has no effect on zero ablation; leave it out")
        if name != "resample" and draws is not None:
            raise SteeringError("draws", f"has no effect on {name} ablation; leave it out")
        return Corruption(ablate=name, reference=reference, draws=int(draws or 1), seed=int(seed))
    if noise is None:
        if draws is not None:
            raise SteeringError("draws", "has no effect with a corrupt prompt; leave it out")
        return Corruption(seed=int(seed))
    sigma = read_number(noise, "noise")
    if sigma <= 0:
        raise SteeringError("noise", f"must be positive, not {sigma:g}")
    if sigma > MAX_NOISE:
        raise SteeringError("noise", f"must be at most {MAX_NOISE:g} deviations, not {sigma:g}; 3 is usual")
    count = NOISE_DRAWS if draws is None else int(draws)
    return Corruption(noise=sigma, subject=subject, draws=count, seed=int(seed))


def read_direction(value: object, corruption: Corruption) -> Direction:
    """Return the direction of a sweep; raise SteeringError if it is unknown or the study is an ablation."""
    if corruption.ablate is not None:
        if value not in (None, "ablation"):
            raise SteeringError("direction", f"{shown(value)} needs a corrupt run; this study ablates")
        return "ablation"
    return "denoising" if value is None else read_choice(value, DIRECTIONS, "direction", what="a direction")


def read_subspaces(
    value: object, sites: Sequence[tuple[str, int]], hidden: int
) -> dict[tuple[str, int], Matrix] | None:
    """Return directions by site.

    Args:
        value: Directions ``[k, hidden]`` for all sites in any form that `parse_matrix` accepts, or ``{point: {layer:
            directions}}``.
        sites: The sites of the sweep.
        hidden: The model's hidden size.

    Raises:
        SteeringError: A site has no directions, or they have another shape.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping) or is_matrix(value):
        return dict.fromkeys(sites, _read_directions(value, hidden, "subspace"))
    result = {}
    for point, layer in sites:
        field = f"subspace.{point}.{layer}"
        by_layer = value.get(point)
        by_layer = by_layer if isinstance(by_layer, Mapping) else {}
        given = by_layer.get(layer, by_layer.get(str(layer)))
        if given is None:
            raise SteeringError(field, "is missing; give directions for every site of the sweep")
        result[point, layer] = _read_directions(given, hidden, field)
    return result


def _read_directions(value: object, hidden: int, field: str) -> Matrix:
    if not is_matrix(value):
        raise SteeringError(field, f"must be a list of directions or an array [k, {hidden}], not {shown(value)}")
    directions = parse_matrix(value, field, SUBSPACE)
    if directions.shape[1] != hidden:
        raise SteeringError(field, f"has shape {list(directions.shape)}; directions are [k, {hidden}]")
    return parse_subspace(directions, hidden, field)


@dataclass(frozen=True)
class Settings:
    """Arguments of a sweep that have been checked."""

    points: tuple[PointName, ...]
    row_layers: tuple[Span, ...]
    layers: tuple[Span, ...]
    positions: Any
    position_window: int
    skip_unaligned: bool
    """Whether columns may contain positions that have no aligned position, which are then not patched."""
    direction: Direction
    metric: str
    custom: CustomMetric | None
    strength: float
    kl_tokens: int
    subspaces: Subspaces | None
    random: Subspaces | None
    """Random directions by site, for the control of subspaces."""
    control: bool

    @property
    def sites(self) -> dict[str, list[int]]:
        """Layers whose rows are needed, by point."""
        layers = sorted({layer for span in self.layers for layer in range(*span)})
        return dict.fromkeys(self.points, layers)


def read_settings(
    runner: Runner, pairs: Sequence[Pair], corruption: Corruption, arguments: Mapping[str, Any]
) -> Settings:
    """Check the arguments of ``PatchingStudy.sweep``; raise ``SteeringError`` for an invalid one."""
    facts = runner.facts
    metric, custom = read_metric(arguments["metric"], has_foil=bool(pairs[0].targets.foil))
    direction = read_direction(arguments["direction"], corruption)
    if metric == "recovered" and direction == "ablation":
        raise SteeringError("metric", "recovered needs a corrupt run, and an ablation has none; use logit_diff")
    kl_tokens = arguments["kl_tokens"]
    if kl_tokens is None:
        kl_tokens = facts.max_reference if metric == "kl" else 0
    most = min(facts.vocab_size, MAX_SCORED)
    wanted = 1 if metric == "kl" and arguments["kl_tokens"] is None else kl_tokens
    if is_integer(wanted) and facts.max_reference < wanted <= most:
        raise SteeringError("kl_tokens", f"at most {facts.max_reference} {facts.reference_limit}")
    if not is_integer(kl_tokens) or not 0 <= kl_tokens <= facts.max_reference:
        raise SteeringError("kl_tokens", f"must be an integer from 0 to {facts.max_reference}, not {shown(kl_tokens)}")
    if metric == "kl" and not kl_tokens:
        raise SteeringError("kl_tokens", "must not be 0 with metric='kl'")
    points = read_points(arguments["points"], facts.points)
    rows = read_layers(arguments["layers"], facts.num_layers)
    layers = windows(rows, read_window(arguments["layer_window"], "layer_window"), facts.num_layers)
    sites = [(point, layer) for point in points for layer in sorted({i for span in layers for i in range(*span)})]
    subspaces = read_subspaces(arguments["subspace"], sites, facts.hidden_size)
    control = bool(arguments["control"])
    return Settings(
        points=points,
        row_layers=rows,
        layers=layers,
        positions=arguments["positions"],
        position_window=read_window(arguments["position_window"], "position_window"),
        skip_unaligned=bool(arguments.get("skip_unaligned", False)),
        direction=direction,
        metric=metric,
        custom=custom,
        strength=read_number(arguments["strength"], "strength"),
        kl_tokens=int(kl_tokens),
        subspaces=subspaces,
        random=None if subspaces is None or not control else random_subspaces(subspaces, corruption.seed),
        control=control,
    )
