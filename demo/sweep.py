# SPDX-License-Identifier: Apache-2.0
"""Sweep over layers and strengths: one batch in which every cell has its own program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from demo.prompts import NEUTRAL
from demo.style import score
from vllm_steer import Edit, SamplingParams

# Half of the prompts begin like prose and half like code, so that steering can move the score both ways.
PROMPTS: tuple[str, ...] = (*NEUTRAL[:4], "def ", "import ", "class ", "for name in")
STRENGTHS: tuple[float, ...] = (-1.5, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 1.5)
SAMPLES = 2
MAX_TOKENS = 48


@dataclass(frozen=True)
class Cell:
    """Texts generated for one layer and strength. ``layer`` is None for plain sampling."""

    layer: int | None
    strength: float
    texts: tuple[str, ...]

    @property
    def scores(self) -> np.ndarray:
        return np.array([score(text) for text in self.texts])


def steering_params(vector: np.ndarray | None, layer: int, strength: float, **settings: Any) -> Any:
    """Return parameters that add ``strength`` times ``vector`` to the output of block ``layer`` at every token."""
    edits = (
        [] if vector is None else [Edit(kind="add", point="post_block", layers=layer, vector=vector, strength=strength)]
    )
    return SamplingParams(
        temperature=0.8, top_p=0.95, max_tokens=MAX_TOKENS, n=SAMPLES, seed=0, steering=edits or None, **settings
    )


def sweep(llm: Any, vectors: np.ndarray) -> list[Cell]:
    """Generate all prompts with plain sampling and with every layer and strength, in one call."""
    plan: list[tuple[int | None, float]] = [(None, 0.0)]
    plan += [(layer, strength) for layer in range(len(vectors)) for strength in STRENGTHS]
    params = [
        steering_params(None if layer is None else vectors[layer], layer or 0, strength)
        for layer, strength in plan
        for _ in PROMPTS
    ]
    outputs = llm.generate(list(PROMPTS) * len(plan), params, use_tqdm=True)
    texts = [tuple(sample.text for sample in output.outputs) for output in outputs]
    return [
        Cell(layer, strength, sum(texts[i * len(PROMPTS) : (i + 1) * len(PROMPTS)], ()))
        for i, (layer, strength) in enumerate(plan)
    ]


def best_layer(cells: list[Cell]) -> int:
    """Return the layer with the widest range of mean scores."""
    spread: dict[int, list[float]] = {}
    for cell in cells:
        if cell.layer is not None:
            spread.setdefault(cell.layer, []).append(float(cell.scores.mean()))
    return max(spread, key=lambda layer: max(spread[layer]) - min(spread[layer]))


def gentlest(cells: list[Cell], layer: int, sign: int) -> float:
    """Return the smallest strength of a sign that has three quarters of the largest effect of that sign.

    Stronger edits mainly degrade the text.
    """
    plain = next(float(cell.scores.mean()) for cell in cells if cell.layer is None)
    moved = {
        cell.strength: sign * (float(cell.scores.mean()) - plain)
        for cell in cells
        if cell.layer == layer and cell.strength * sign > 0
    }
    return min((s for s in moved if moved[s] >= 0.75 * max(moved.values())), key=abs)
