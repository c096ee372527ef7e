# SPDX-License-Identifier: Apache-2.0
"""Comparison of two probes on the same texts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from vllm_steer.lab.probe_result import ProbeResult
from vllm_steer.lab.statistics import auroc, bootstrap_interval, least_without_loss

MARGIN = 0.02
"""Loss of AUROC that a comparison accepts."""


@dataclass(frozen=True, eq=False)
class ProbeComparison:
    """Scores of two probes on the same texts."""

    old: ProbeResult
    new: ProbeResult
    margin: float = MARGIN
    seed: int = 0

    @property
    def difference(self) -> float:
        """Difference of the AUROCs, new minus old."""
        return self.new.auroc - self.old.auroc

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Bootstrap interval of the difference with 95 % coverage; both probes score the drawn texts."""
        scores = np.stack([self.old.scores, self.new.scores], axis=1)
        positive, negative = scores[self.new.labels], scores[~self.new.labels]
        return bootstrap_interval(
            positive, negative, lambda p, n: auroc(p[:, 1], n[:, 1]) - auroc(p[:, 0], n[:, 0]), self.seed
        )

    @property
    def state(self) -> Literal["PASS", "THRESHOLD STALE", "SCORER DEGRADED", "INCONCLUSIVE"]:
        """The verdict in one or two words.

        ``SCORER DEGRADED`` if the interval of the difference is below zero; ``THRESHOLD STALE`` if the new probe's
        stored threshold is stale; ``PASS`` if the new probe is better than chance, the interval excludes a loss above
        the margin, and a stored threshold is shown to hold; ``INCONCLUSIVE`` otherwise, such as with too few texts.
        """
        low, high = self.interval
        if high < 0:
            return "SCORER DEGRADED"
        if self.new.threshold_state == "stale":
            return "THRESHOLD STALE"
        told = self.new.threshold_state in (None, "holds") and self.new.better_than_chance and not self.too_few
        return "PASS" if told and low >= -self.margin else "INCONCLUSIVE"

    @property
    def too_few(self) -> str:
        """Reason why the texts are too few to tell; empty if they are enough.

        If no drawn sample has a loss, the bootstrap does not tell how large it may be: that no text was lost excludes a
        loss above the margin for a number of texts only.
        """
        fewest = min(self.new.labels.sum(), (~self.new.labels).sum())
        if self.interval[0] != 0 or self.margin == 0 or fewest >= (least := least_without_loss(self.margin)):
            return ""
        return f"too few texts to tell ({fewest} of a class); a loss of {self.margin:g} is excluded by at least {least}"

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        (low, high), labels = self.interval, self.new.labels
        found = f"AUROC {self.new.auroc:.3g} instead of {self.old.auroc:.3g}: {self.difference:+.3g}"
        texts = f"{labels.sum()} positive and {(~labels).sum()} negative texts"
        accepted = f"a loss of {self.margin:g} is accepted"
        threshold = f"; {self.new.threshold_verdict}" if self.new.stored else ""
        few = f"; {self.too_few}" if self.state == "INCONCLUSIVE" and self.too_few else ""
        return f"{self.state}: {found} (95 % interval {low:+.3g} to {high:+.3g}; {accepted}) on {texts}{few}{threshold}"
