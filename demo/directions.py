# SPDX-License-Identifier: Apache-2.0
"""Directions in the residual stream: from pairs of sentences, and random ones as the control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from demo.texts import Trait
from vllm_steer import Edit, capture_hidden_states

RANDOM_DIRECTIONS = 20


@dataclass(frozen=True)
class Direction:
    """A unit vector at ``post_block`` of a layer.

    A *dose* is the length of the added vector divided by the median length of the stream at the layer, so that a number
    means the same in each layer.
    """

    layer: int
    unit: np.ndarray
    length: float
    """Median length of the stream at the layer."""
    centre: np.ndarray
    """Mean of the stream over the sentences of the pairs."""
    half: float
    """Half of the distance between the means of the two poles."""

    def add(self, dose: float, **fields: Any) -> Any:
        """Return the edit that adds a dose of the direction."""
        vector = self.unit * self.length
        return Edit("add", point="post_block", layers=self.layer, vector=vector, strength=dose, **fields)

    def clamp(self) -> Any:
        """Return the edit that holds the stream's component along the direction at its mean, except at the first token.

        The first token's stream is the same in all texts and many times longer; other tokens attend to it.
        """
        mean = float(self.centre @ self.unit)
        fields = {"point": "post_block", "layers": self.layer, "tokens": [[1, None]]}
        return Edit("clamp", vector=self.unit, low=mean, high=mean, **fields)

    def probe(self, **fields: Any) -> dict[str, Any]:
        """Return a readout: the component along the direction, 1 at the plus pole's mean and -1 at the minus pole's."""
        weights = self.unit / self.half
        bias = -float(self.centre @ weights)
        return {"probe": weights, "bias": bias, "point": "post_block", "layer": self.layer, **fields}

    def random(self) -> list[Direction]:
        """Return :data:`RANDOM_DIRECTIONS` random directions of the same layer and length."""
        drawn = np.random.default_rng(self.layer).standard_normal((RANDOM_DIRECTIONS, len(self.unit)))
        units = (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)
        return [replace(self, unit=unit) for unit in units]


def find_directions(llm: Any, traits: Sequence[Trait]) -> list[dict[int, Direction]]:
    """Return, for each trait, the direction of each layer from the minus pole to the plus pole.

    It is the difference of the means over the pairs, where each sentence has equal weight. The first token is left out:
    its stream does not depend on the text and is many times longer than that of other tokens.
    """
    texts = [text for trait in traits for pair in trait.pairs for text in pair]
    states = capture_hidden_states(
        llm, texts, hooks={"post_block": "all"}, positions=[[1, None]], dtype="float32", use_tqdm=False
    )
    found: list[dict[int, Direction]] = [{} for _ in traits]
    for point, layer in states.sites:
        rows, owner = states.tensor(point, layer).numpy(), states.prompt_index(point, layer).numpy()
        start = 0
        for trait, layers in zip(traits, found, strict=True):
            numbers = range(start, start + 2 * len(trait.pairs))
            means = np.stack([rows[owner == number].mean(0) for number in numbers])
            difference = means[0::2].mean(0) - means[1::2].mean(0)
            size = float(np.linalg.norm(difference))
            length = float(np.median(np.linalg.norm(rows[np.isin(owner, numbers)], axis=1)))
            layers[layer] = Direction(layer, difference / size, length, means.mean(0), size / 2)
            start = numbers.stop
    return found
