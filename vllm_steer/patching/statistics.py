# SPDX-License-Identifier: Apache-2.0
"""Statistics of a grid over several pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]

RESAMPLES = 2000
"""Bootstrap samples of the pairs."""
PERMUTATIONS = 4096
"""Most sign patterns of the permutation test; fewer pairs than 13 are tested with all of their patterns."""


@dataclass(frozen=True, eq=False)
class GridStatistics:
    """Statistics of each cell over the pairs; arrays are float64 with the grid's shape. Missing cells are NaN."""

    pairs: int
    effect: Array
    """Mean over the pairs of the cell's metric minus the metric of the unpatched run."""
    standard_error: Array
    """Sample standard deviation of the pairs' effects over the square root of their number; NaN for one pair."""
    low: Array
    """Lower end of the bootstrap percentile interval of the effect."""
    high: Array
    """Upper end of the interval."""
    p_value: Array
    """Two-sided sign-flip permutation test of the hypothesis that the effects are symmetric about zero."""
    confidence: float
    """Coverage of the interval."""


def summarise(effects: Array, confidence: float = 0.95, seed: int = 0) -> GridStatistics:
    """Return the statistics of effects ``[pairs, ...]``."""
    pairs = len(effects)
    mean = effects.mean(axis=0)
    error = effects.std(axis=0, ddof=1) / np.sqrt(pairs) if pairs > 1 else np.full(mean.shape, np.nan)
    random = np.random.default_rng(seed)
    # Means of resampled pairs are products with counts, which needs no copy of the grid per sample.
    counts = random.multinomial(pairs, np.full(pairs, 1 / pairs), RESAMPLES)
    flat = effects.reshape(pairs, -1)
    tail = 50 * (1 - confidence)
    low, high = (each.reshape(mean.shape) for each in np.percentile(counts @ flat / pairs, [tail, 100 - tail], axis=0))
    p_value = _sign_flip(flat, random).reshape(mean.shape)
    return GridStatistics(pairs, mean, error, low, high, np.where(np.isnan(mean), np.nan, p_value), confidence)


def _sign_flip(flat: Array, random: np.random.Generator) -> Array:
    """Return p-values ``[cells]`` of effects ``[pairs, cells]``."""
    pairs = len(flat)
    exact = 2**pairs <= PERMUTATIONS
    if exact:
        signs = 1.0 - 2.0 * ((np.arange(2**pairs)[:, None] >> np.arange(pairs)) & 1)
    else:
        signs = random.choice([-1.0, 1.0], (PERMUTATIONS, pairs))
    # A tolerance, because equal sums in another order round differently, by as much as their terms do.
    least = np.abs(flat.sum(axis=0)) - 1e-12 * np.abs(flat).sum(axis=0)
    extreme = (np.abs(signs @ flat) >= least).sum(axis=0)
    # The observed signs are one of the patterns; random patterns need not contain it.
    result: Array = extreme / len(signs) if exact else (extreme + 1) / (len(signs) + 1)
    return result
