# SPDX-License-Identifier: Apache-2.0
"""Scores of a probe on labelled texts, and whether they are better than chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm_steer.lab.examples import Text
from vllm_steer.lab.methods import Floats, Labels
from vllm_steer.lab.statistics import auroc, auroc_interval, permuted_aurocs

MAX_CHANCE = 0.01
"""Largest probability that random labels have such an AUROC."""


@dataclass(frozen=True, eq=False)
class ProbeResult:
    """Scores of a probe on texts that it was not trained on."""

    texts: Sequence[Text]
    scores: Floats
    labels: Labels
    threshold: float
    """Larger scores are positive."""
    controls: Floats | None = None
    """AUROCs of probes trained and judged with permuted labels; None if the probe was only checked."""
    seed: int = 0

    @cached_property
    def auroc(self) -> float:
        """Probability that a positive text has a larger score than a negative one; ties count half."""
        return auroc(self.scores[self.labels], self.scores[~self.labels])

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Bootstrap interval of the AUROC over the texts, with 95 % coverage."""
        return auroc_interval(self.scores[self.labels], self.scores[~self.labels], self.seed)

    @cached_property
    def permuted(self) -> Floats:
        """AUROCs of the same scores with permuted labels of the texts."""
        return permuted_aurocs(self.scores, self.labels, self.seed)

    @property
    def chance(self) -> float:
        """Probability that permuted labels of the texts have at least this AUROC."""
        return float(((self.permuted >= self.auroc).sum() + 1) / (len(self.permuted) + 1))

    @property
    def accuracy(self) -> float:
        """Share of the texts on the right side of the threshold."""
        return float(((self.scores > self.threshold) == self.labels).mean())

    @property
    def recall(self) -> float:
        """Share of the positive texts above the threshold."""
        return float((self.scores[self.labels] > self.threshold).mean())

    @property
    def false_positives(self) -> float:
        """Share of the negative texts above the threshold."""
        return float((self.scores[~self.labels] > self.threshold).mean())

    @property
    def better_than_chance(self) -> bool:
        """Whether the interval is above 0.5, chance is small, and 95 % of the probes of permuted labels are worse."""
        worse = self.controls is None or self.auroc > np.quantile(self.controls, 0.95)
        return bool(self.interval[0] > 0.5 and self.chance <= MAX_CHANCE and worse)

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        begin = "better than chance" if self.better_than_chance else "no better than chance"
        low, high = self.interval
        found = f"AUROC {self.auroc:.3g} (95 % interval {low:.3g} to {high:.3g})"
        rates = f"recall {self.recall:.0%}, false positives {self.false_positives:.0%}"
        found += f", accuracy {self.accuracy:.0%} at the threshold {self.threshold:g} ({rates})"
        found += f" on {self.labels.sum()} positive and {(~self.labels).sum()} negative texts"
        if self.controls is None:
            low, high = np.percentile(self.permuted, [2.5, 97.5])
            control = f"permuted labels give an AUROC of {low:.3g} to {high:.3g}"
        else:
            least, most = min(self.controls), max(self.controls)
            control = f"{len(self.controls)} probes of permuted labels have an AUROC of {least:.3g} to {most:.3g}"
        return f"{begin}: {found}; {control}, and the probability of this AUROC by chance is {self.chance:.2g}"
