# SPDX-License-Identifier: Apache-2.0
"""Recall at few false positives, stored thresholds, and two probes on the same texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_steer import SteeringError
from vllm_steer.lab import ProbeComparison, ProbeResult, Threshold
from vllm_steer.lab.probe_result import read_probe
from vllm_steer.lab.statistics import share_interval, threshold_at
from vllm_steer.registry.directions import save_module
from vllm_steer.registry.vector_files import read_vector_file

RANDOM = np.random.default_rng(3)


def result(positive: Any, negative: Any, threshold: float = 0.0, **fields: Any) -> ProbeResult:
    scores = np.concatenate([positive, negative]).astype(float)
    labels = np.arange(len(scores)) < len(positive)
    return ProbeResult([[i] for i in range(len(scores))], scores, labels, threshold, **fields)


def normal(shift: float, count: int = 400, **fields: Any) -> ProbeResult:
    """Return scores of a probe that tells the classes apart by some deviations; the noise is that of the texts."""
    random = np.random.default_rng(5)
    return result(random.normal(shift, 1, count), random.normal(0, 1, count), **fields)


def stored(value: float, rate: float, digest: str = "other", engine: str = "") -> Threshold:
    return Threshold(value, rate, 400, digest, engine)


def test_the_threshold_keeps_its_rate_on_other_texts() -> None:
    """Catches the threshold of a ROC curve, which lets twice the rate of further texts through if there are few."""
    rates = [(RANDOM.normal(size=2000) > threshold_at(RANDOM.normal(size=99), 0.01)).mean() for _ in range(400)]
    assert 0.007 < np.mean(rates) < 0.0125
    assert threshold_at(np.arange(1000.0), 0.01) == 990, "ten of 1001 scores are above"


def test_recall_at_few_false_positives() -> None:
    """Catches a rate that the negatives cannot tell, a threshold that counts itself, and recall of the other class."""
    found = result([5, 6, 7, -1], np.arange(99) / 100).recall_at(0.01)
    assert found is not None and (found.value, found.threshold) == (0.75, 0.98)
    assert found.interval[0] < 0.75 <= found.interval[1] <= 1
    few = result([5, 6, 7, -1], np.arange(98) / 100)
    assert few.recall_at(0.01) is None and few.recall_at(0.02) is not None
    assert few.recalls == (
        "recall at 1 % false positives not told: too few negatives (98 of at least 99); "
        "recall at 0.1 % false positives not told: too few negatives (98 of at least 999); "
        "recall_at tells it at rates from 0.011"
    )
    assert few.recall_at(0.011) is not None, "the rate that it names"
    for rate in (0, 1, 2):
        with pytest.raises(SteeringError, match=f"rate: must be above 0 and below 1, such as 0.01; not {rate}"):
            few.recall_at(rate)
    many = normal(3, 1000).recalls
    assert "recall at 1 % false positives 7" in many and "recall at 0.1 % false positives " in many
    assert "not told" not in many


def test_an_interval_of_a_share() -> None:
    """Catches an interval without width at 0 of n. Reference: Wilson's interval of Brown, Cai and DasGupta."""
    assert share_interval(0, 100) == pytest.approx((0, 0.0370), abs=1e-4)
    assert share_interval(10, 100) == pytest.approx((0.0552, 0.1744), abs=1e-4)
    assert share_interval(100, 100) == pytest.approx((0.9630, 1), abs=1e-4)


def test_a_stored_threshold_holds_or_is_stale() -> None:
    """Catches a threshold that lets too many negatives through and passes, and a verdict about too few of them."""
    value = threshold_at(normal(3).scores[400:], 0.05)
    same = normal(3, threshold=value, stored=stored(value, 0.05))
    assert same.threshold_state == "holds" and same.threshold_verdict.startswith(
        "threshold holds: false positives 4.75%"
    )
    moved = normal(3, threshold=value - 1, stored=stored(value - 1, 0.05))
    assert moved.threshold_state == "stale" and moved.threshold_verdict.startswith("THRESHOLD STALE: ")
    assert moved.better_than_chance, "the scores are as good as before"
    few = result([9] * 5, range(5), 7, stored=stored(7, 0.01))
    assert few.threshold_state == "not told" and "not told: too few negatives: " in few.threshold_verdict
    again = normal(3, threshold=value, stored=stored(value, 0.05, normal(3)._digest))
    assert again.threshold_state == "not told" and "chosen on these texts" in again.threshold_verdict
    other = normal(3, threshold=value, stored=stored(value, 0.05, engine="float32"), engine="bfloat16")
    assert other.threshold_verdict.endswith("for 5 % false positives on 400 texts with float32, not bfloat16")
    assert normal(3).threshold_state is None and not normal(3).threshold_verdict


def test_a_threshold_is_written_beside_everything_else(tmp_path: Path) -> None:
    """Catches a write that loses edits, other probes, the description or the thresholds of other probes."""
    path = tmp_path / "two.safetensors"
    probe = {"weights": np.ones(4), "bias": 0.5, "point": "post_block", "layer": 1}
    hidden = {"weights": np.ones((2, 4)), "outputs": [1.0, 2.0], "point": "post_block", "layer": 1}
    content = {"base": {"post_block": {"1": np.ones(4)}}, "probes": {"a": probe, "b": hidden}}
    save_module(path, content, "org/model", {"pool": "last"})
    module, metadata = read_vector_file(path)
    first = normal(2, engine="float32, vLLM 0").store_threshold(path, 0.01, "a")
    second = normal(1).store_threshold(path, 0.1, "b")
    assert (first.false_positives, first.texts, first.engine) == (0.01, 800, "float32, vLLM 0")
    after, about = read_vector_file(path)
    assert after == module and about.model == "org/model" and about.provenance["pool"] == "last"
    assert set(about.provenance) - set(metadata.provenance) == {"thresholds"}
    assert read_probe(path, "a")[3] == {"a": first, "b": second}
    for rate, message in (
        (0.0, "must be above 0"),
        (1, "must be above 0"),
        (0.001, "needs 999 negative texts .* not 400"),
    ):
        with pytest.raises(SteeringError, match=f"false_positives: .*{message}"):
            normal(2).store_threshold(path, rate, "a")
    save_module(path, content, "", {"thresholds": "[1]"})
    with pytest.raises(SteeringError, match="has an invalid entry thresholds in its provenance"):
        read_probe(path, "a")


@pytest.mark.parametrize(
    ("old", "new", "state"),
    [
        (normal(2), normal(2), "PASS"),
        (normal(2), normal(3), "PASS"),
        (normal(3), normal(1), "SCORER DEGRADED"),
        (normal(2, 20), ProbeResult([], normal(2, 20).scores[::-1] * -1 + 1, normal(2, 20).labels, 0), "INCONCLUSIVE"),
        (normal(2), normal(2, stored=stored(0.0, 0.01)), "THRESHOLD STALE"),
        (normal(2), normal(2, threshold=9.0, stored=stored(9.0, 0.0001)), "INCONCLUSIVE"),
        (normal(0), normal(0), "INCONCLUSIVE"),
    ],
)
def test_the_words_of_a_comparison(old: ProbeResult, new: ProbeResult, state: str) -> None:
    """Catches a worse probe that passes, a stale threshold that passes, and a pass that the texts do not show."""
    compared = ProbeComparison(old, new)
    assert compared.state == state, compared.verdict
    assert compared.verdict.startswith(f"{state}: AUROC {new.auroc:.3g} instead of {old.auroc:.3g}: ")
    low, high = compared.interval
    assert low <= compared.difference <= high


@pytest.mark.parametrize(("count", "state"), [(10, "INCONCLUSIVE"), (188, "INCONCLUSIVE"), (189, "PASS")])
def test_few_texts_without_a_loss_do_not_pass(count: int, state: str) -> None:
    """Catches a pass because of an interval without width, which any two probes have on few separable texts."""
    one, two = (result(np.arange(count) + shift, -np.arange(count) - 1.0) for shift in (1.0, 2.0))
    compared = ProbeComparison(one, two)
    assert compared.interval == (0, 0) and compared.state == state, compared.verdict
    assert ("too few texts to tell" in compared.verdict) == (state != "PASS")
    assert ("a loss of 0.02 is excluded by at least 189" in compared.verdict) == (state != "PASS")


def test_a_comparison_is_paired() -> None:
    """Catches an interval of two independent samples, which is too wide to show a small loss."""
    old = normal(2)
    new = ProbeResult(old.texts, old.scores + np.random.default_rng(1).normal(0, 0.3, 800), old.labels, 0)
    low, high = ProbeComparison(old, new).interval
    alone = [np.subtract(*each.interval[::-1]) for each in (old, new)]
    assert high - low < min(alone) * 0.7
    assert json.dumps(ProbeComparison(old, new).difference) == json.dumps(new.auroc - old.auroc)
