# SPDX-License-Identifier: Apache-2.0
"""Properties of the model that draws depend on, and draws that depend on nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from vllm_steer.points import POINT_NAMES, points_on
from vllm_steer.testing.fuzz.workload import Form

Random: TypeAlias = np.random.Generator


@dataclass(frozen=True)
class ModelFacts:
    """Properties of the model that a workload depends on.

    Attributes:
        scale: Typical norm of the rows at ``len(POINT_NAMES) * layer + point``.
        points: Hook points that can be edited and captured.
        cuda: Whether the engine runs on a GPU.
    """

    hidden: int
    layers: int
    vocab: int
    scale: tuple[float, ...]
    points: tuple[str, ...] = points_on(())
    cuda: bool = False


def pick(rng: Random, choices: Sequence[Any]) -> Any:
    """Return one of several choices."""
    return choices[int(rng.integers(len(choices)))]


def draw_layers(rng: Random, facts: ModelFacts, most: int) -> list[int]:
    count = int(rng.integers(1, min(most, facts.layers) + 1))
    return sorted(int(layer) for layer in rng.choice(facts.layers, count, replace=False))


def draw_edit(rng: Random, facts: ModelFacts, field: str, kind: str, **given: Any) -> Form:
    """Draw an edit at one or two layers of a point, with a norm comparable to the rows there."""
    point = str(rng.choice(facts.points))
    layers = draw_layers(rng, facts, 2)
    length = facts.scale[len(POINT_NAMES) * layers[0] + POINT_NAMES.index(point)] * float(rng.uniform(0.3, 1.2))
    drawn = {"seed": int(rng.integers(1 << 30)), "length": length}
    strength = float(rng.uniform(0.4, 1.0))
    return {
        "field": field, "kind": kind, "point": point, "layers": layers, "vector": drawn, "strength": strength, **given,
    }  # fmt: skip
