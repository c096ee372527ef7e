# SPDX-License-Identifier: Apache-2.0
"""Scores of a probe on labelled texts, thresholds, and whether they are better than chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.lab.examples import Examples, Text
from vllm_steer.lab.statistics import (
    Floats,
    Labels,
    auroc,
    bootstrap_interval,
    least_negatives,
    permuted_aurocs,
    share_interval,
    threshold_at,
)
from vllm_steer.registry.directions import replace_module_file
from vllm_steer.registry.metadata import ModuleMetadata
from vllm_steer.registry.vector_files import read_vector_file
from vllm_steer.request.probe import HiddenLayer, Probe
from vllm_steer.request.scalars import read_number, shown

MAX_CHANCE = 0.01
"""Largest probability that random labels have such an AUROC."""
RATES = (0.01, 0.001)
"""Rates of false positives at which recall is reported."""
_THRESHOLDS = "thresholds"
"""Entry of a file's provenance: thresholds by the name of the probe, as JSON."""


class Recall(NamedTuple):
    """Recall at a rate of false positives."""

    value: float
    threshold: float
    """Larger scores are positive."""
    interval: tuple[float, float]
    """Bootstrap interval over the texts, with 95 % coverage."""


class Threshold(msgspec.Struct, frozen=True):
    """A threshold of scores of whole texts."""

    value: float
    """Larger scores are positive."""
    false_positives: float
    """Rate of false positives that the threshold was chosen for."""
    texts: int
    """Number of texts that the threshold was chosen on."""
    digest: str
    """Hash of these texts and labels."""
    engine: str
    """Settings of the engine that the scores depend on, such as the dtype; empty for stored rows."""

    def __str__(self) -> str:
        rate = f"{100 * self.false_positives:g} % false positives"
        return f"threshold {self.value:.4g} for {rate} on {self.texts} texts"


@dataclass(frozen=True, eq=False, repr=False)
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
    stored: Threshold | None = None
    """The threshold of the probe's file, if it has one."""
    engine: str = ""
    """Settings of the engine that the scores depend on; empty for stored rows."""

    def __repr__(self) -> str:
        texts = f"positive={self.labels.sum()}, negative={(~self.labels).sum()}"
        return f"ProbeResult(auroc={self.auroc:.3g}, recall={self.recall:.3g}, threshold={self.threshold:.4g}, {texts})"

    @cached_property
    def auroc(self) -> float:
        """Probability that a positive text has a larger score than a negative one; ties count half."""
        return auroc(self.scores[self.labels], self.scores[~self.labels])

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Bootstrap interval of the AUROC over the texts, with 95 % coverage."""
        return bootstrap_interval(self.scores[self.labels], self.scores[~self.labels], auroc, self.seed)

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

    def recall_at(self, rate: float) -> Recall | None:
        """Return the recall at a rate of false positives; None if there are too few negative texts for the rate.

        At most this share of further negative texts is expected to score above the threshold.

        Raises:
            SteeringError: The rate is not above 0 and below 1.
        """
        rate = read_rate(rate, "rate")
        positive, negative = self.scores[self.labels], self.scores[~self.labels]
        if len(negative) < least_negatives(rate):
            return None

        def measure(high: Floats, low: Floats) -> float:
            return float((high > threshold_at(low, rate)).mean())

        interval = bootstrap_interval(positive, negative, measure, self.seed)
        return Recall(measure(positive, negative), threshold_at(negative, rate), interval)

    @property
    def recalls(self) -> str:
        """Recall at 1 % and 0.1 % false positives as one sentence, with intervals and thresholds."""
        told, negatives = "; ".join(map(self._describe_recall, RATES)), int((~self.labels).sum())
        if negatives >= least_negatives(min(RATES)):
            return told
        return f"{told}; recall_at tells it at rates from {np.ceil(1000 / (negatives + 1)) / 1000:g}"

    def _describe_recall(self, rate: float) -> str:
        found, begin = self.recall_at(rate), f"recall at {100 * rate:g} % false positives"
        if found is None:
            return f"{begin} not told: too few negatives ({(~self.labels).sum()} of at least {least_negatives(rate)})"
        low, high = found.interval
        return f"{begin} {found.value:.0%} (95 % interval {low:.0%} to {high:.0%}; threshold {found.threshold:.4g})"

    def store_threshold(self, path: str | Path, false_positives: float, name: str | None = None) -> Threshold:
        """Write a threshold into the probe's file: the smallest that keeps false positives at a rate.

        Args:
            path: The file, which is replaced as a whole.
            false_positives: Share of further negative texts that is expected above the threshold, such as 0.01.
            name: Name of the probe, if the file has several.

        Raises:
            SteeringError: The rate needs more negative texts, or the file cannot be read or written.
        """
        check_rate(false_positives, self.labels)
        name, _, metadata, thresholds = read_probe(path, name)
        value = threshold_at(self.scores[~self.labels], false_positives)
        threshold = Threshold(value, false_positives, len(self.labels), self._digest, self.engine)
        entry = msgspec.json.encode({**thresholds, name: threshold}).decode()
        metadata = msgspec.structs.replace(metadata, provenance={**metadata.provenance, _THRESHOLDS: entry})
        replace_module_file(path, read_vector_file(path)[0], metadata)
        return threshold

    @cached_property
    def threshold_state(self) -> Literal["holds", "stale", "not told"] | None:
        """Whether the stored threshold keeps its rate of false positives on these texts; None without one.

        ``stale`` if the 95 % interval of the false positives excludes the rate; ``not told`` if there are too few
        negative texts, or the threshold was chosen on these texts.
        """
        if self.stored is None:
            return None
        low, high = self._rates
        if not low <= self.stored.false_positives <= high:
            return "stale"
        told = (~self.labels).sum() >= least_negatives(self.stored.false_positives)
        return "holds" if told and self.stored.digest != self._digest else "not told"

    @property
    def threshold_verdict(self) -> str:
        """The verdict about the stored threshold in one sentence; empty without one."""
        if self.stored is None:
            return ""
        why = "chosen on these texts" if self.stored.digest == self._digest else "too few negatives"
        begin = {"holds": "threshold holds", "stale": "THRESHOLD STALE"}.get(
            str(self.threshold_state), f"threshold not told: {why}"
        )
        low, high = self._rates
        found = f"false positives {self.false_positives:.2%} (95 % interval {low:.2%} to {high:.2%})"
        other = self.stored.engine != self.engine
        engine = f" with {self.stored.engine or 'stored rows'}, not {self.engine}" if other else ""
        return f"{begin}: {found}; chosen was the {self.stored}{engine}"

    @property
    def _digest(self) -> str:
        return Examples(tuple(self.texts), self.labels, paired=False).digest

    @property
    def _rates(self) -> tuple[float, float]:
        negative = self.scores[~self.labels]
        return share_interval(int((negative > self.threshold).sum()), len(negative))

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


def read_probe(path: str | Path, name: str | None = None) -> tuple[str, Probe, ModuleMetadata, dict[str, Threshold]]:
    """Return the name and content of a file's probe, the file's metadata, and its thresholds by probe name.

    Raises:
        SteeringError: The file cannot be read, has no such probe, or the probe has no hook point and layer.
    """
    if not isinstance(path, (str, Path)):
        raise SteeringError("path", f"must be a file, not {type(path).__name__}; write a trained probe with its save")
    module, metadata = read_vector_file(path)
    names = ", ".join(module.probes)
    if not module.probes:
        raise SteeringError("probe", f"{path} has vectors and no probe; train one with train_probe")
    if name is None and len(module.probes) > 1:
        raise SteeringError("name", f"{path} has several probes; name one of {names}")
    chosen = next(iter(module.probes)) if name is None else name
    if (probe := module.probes.get(chosen)) is None:
        raise SteeringError("name", f"{path} has no probe {shown(name)}; use one of {names}")
    if probe.point is None or probe.layer is None:
        raise SteeringError("probe", f"{path} does not name its hook point and layer; write it with both")
    try:
        thresholds = msgspec.json.decode(metadata.provenance.get(_THRESHOLDS, "{}"), type=dict[str, Threshold])
    except msgspec.MsgspecError as error:
        raise SteeringError("probe", f"{path} has an invalid entry {_THRESHOLDS} in its provenance: {error}") from None
    return chosen, probe, metadata, thresholds


def read_rate(value: object, field: str) -> float:
    """Return a rate of false positives; raise SteeringError for anything else."""
    rate = read_number(value, field)
    if not 0 < rate < 1:
        raise SteeringError(field, f"must be above 0 and below 1, such as 0.01; not {shown(value)}")
    return rate


def readout_of(probe: Probe) -> dict[str, Any]:
    """Return a file's probe as a readout of `SamplingParams`."""
    weights: Any = probe.weights
    if isinstance(weights, HiddenLayer):
        weights = {**weights.arrays, "activation": weights.activation}
    return {"probe": weights, **probe.reading}


def check_rate(value: object, labels: Labels) -> None:
    """Raise SteeringError unless a value is a rate of false positives, and there are enough negative labels for it."""
    rate, negatives = read_rate(value, "false_positives"), int((~labels).sum())
    if negatives < (least := least_negatives(rate)):
        problem = f"a rate of {rate:g} needs {least} negative texts that choose the threshold"
        raise SteeringError("false_positives", f"{problem}, not {negatives}; give more texts, or a larger rate")
