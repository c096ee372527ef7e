# SPDX-License-Identifier: Apache-2.0
"""Statistics of scores of two classes, and of an effect beside those of controls."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def auroc(positive: npt.ArrayLike, negative: npt.ArrayLike) -> float:
    """Return the probability that a positive score is larger than a negative one; ties count half."""
    high, low = np.asarray(positive, float), np.sort(np.asarray(negative, float))
    below, upto = np.searchsorted(low, high, "left"), np.searchsorted(low, high, "right")
    return float(((below + upto) / 2).mean() / len(low))


def auroc_interval(
    positive: npt.NDArray[np.float64], negative: npt.NDArray[np.float64], seed: int = 0, count: int = 2000
) -> tuple[float, float]:
    """Return the bootstrap percentile interval of the AUROC with 95 % coverage, resampling each class."""
    random = np.random.default_rng(seed)
    drawn = [auroc(*(random.choice(each, len(each)) for each in (positive, negative))) for _ in range(count)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def permuted_aurocs(
    scores: npt.NDArray[np.float64], labels: npt.NDArray[np.bool_], seed: int = 0, count: int = 2000
) -> npt.NDArray[np.float64]:
    """Return the AUROC for each of several random permutations of the labels."""
    random = np.random.default_rng(seed)
    permuted = (random.permutation(labels) for _ in range(count))
    return np.array([auroc(scores[each], scores[~each]) for each in permuted])


def folds(groups: npt.NDArray[np.int64], classes: npt.NDArray[Any], count: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the number of each example's fold. A group is in one fold; groups of a class spread over all folds.

    Args:
        groups: Number of each example's group.
        classes: Class of each example; the first example of a group decides.
        count: Number of folds.
        seed: Seed of the order.
    """
    random = np.random.default_rng(seed)
    numbers, first = np.unique(groups, return_index=True)
    fold = np.empty(len(numbers), np.int64)
    for each in np.unique(classes[first]):
        members = random.permutation(np.flatnonzero(classes[first] == each))
        fold[members] = np.arange(len(members)) % count
    return fold[np.searchsorted(numbers, groups)]


def chance(effect: float, controls: npt.ArrayLike) -> float:
    """Return the probability that one more control has at least this effect; NaN for fewer than two.

    It is also NaN if all of them are equal to the effect.

    It is the one-sided tail of Student's t for a new value of a normal sample: the scale is that of the sample's
    deviation and of its mean, so that few controls need a larger distance. To first order, the effect of a random
    direction is a component of a random unit vector, which is normal in a wide stream.
    """
    others = np.asarray(controls, float)
    freedom = len(others) - 1
    if freedom < 1:  # no deviation
        return float("nan")
    with np.errstate(divide="ignore", invalid="ignore"):
        t = (effect - others.mean()) / (others.std(ddof=1) * np.sqrt(1 + 1 / len(others)))
    # With t = sqrt(freedom) * tan(angle), the density is a power of the cosine.
    angles = np.linspace([np.arctan(t / np.sqrt(freedom)), -np.pi / 2], np.pi / 2, 20_001)
    tail, whole = np.trapezoid(np.cos(angles) ** (freedom - 1), angles, axis=0)
    return float(tail / whole)
