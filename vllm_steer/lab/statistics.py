# SPDX-License-Identifier: Apache-2.0
"""Statistics of scores of two classes, and of an effect beside those of controls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = "npt.NDArray[np.float64]"
Labels: TypeAlias = "npt.NDArray[np.bool_]"
_Z2 = 1.959964**2


def auroc(positive: npt.ArrayLike, negative: npt.ArrayLike) -> float:
    """Return the probability that a positive score is larger than a negative one; ties count half."""
    high, low = np.asarray(positive, float), np.sort(np.asarray(negative, float))
    below, upto = np.searchsorted(low, high, "left"), np.searchsorted(low, high, "right")
    return float(((below + upto) / 2).mean() / len(low))


def bootstrap_interval(
    positive: Floats, negative: Floats, statistic: Callable[[Floats, Floats], float], seed: int = 0, count: int = 2000
) -> tuple[float, float]:
    """Return the bootstrap percentile interval of a statistic with 95 % coverage, resampling each class."""
    random = np.random.default_rng(seed)
    drawn = [statistic(*(random.choice(each, len(each)) for each in (positive, negative))) for _ in range(count)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def least_negatives(rate: float) -> int:
    """Return the smallest number of negatives that tells a threshold with this rate of false positives."""
    return int(np.ceil(1 / rate - 1 - 1e-9))


def threshold_at(negative: Floats, rate: float) -> float:
    """Return the smallest threshold above which at most this share of further negative scores is expected.

    Of ``n`` scores and one more from the same distribution, the last is above the ``k``-th largest of the others with a
    probability of ``k / (n + 1)`` (split conformal prediction).
    """
    return float(np.sort(negative)[-int(rate * (len(negative) + 1) + 1e-9)])


def share_interval(count: int, total: int) -> tuple[float, float]:
    """Return Wilson's interval with 95 % coverage of a share of which ``count`` of ``total`` were seen."""
    middle = (count + _Z2 / 2) / (total + _Z2)
    half = np.sqrt(_Z2 * (count * (total - count) / total + _Z2 / 4)) / (total + _Z2)
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))


def least_without_loss(margin: float) -> int:
    """Return the smallest number of texts that excludes a share of losses above ``margin`` if none of them has one."""
    return int(np.ceil(_Z2 * (1 / margin - 1) - 1e-9))


def permuted_aurocs(scores: Floats, labels: Labels, seed: int = 0, count: int = 2000) -> Floats:
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
