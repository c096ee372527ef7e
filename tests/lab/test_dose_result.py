# SPDX-License-Identifier: Apache-2.0
"""Verdicts of given scores, and the file of an interrupted study."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from vllm_steer import SteeringError
from vllm_steer.lab.dose_result import DoseResult
from vllm_steer.lab.samples import Kind, Sample, SampleFile, Study, read_samples
from vllm_steer.lab.scores import Keywords, ProbeScore, repetition, score_name
from vllm_steer.lab.statistics import chance

DOSES, LAYERS, PROMPTS, CONTROLS = (0.1, 0.2, 0.4), (3, 5), 16, 20
STUDY = Study(
    model="m", vectors="v", point="post_block", layers=LAYERS, doses=DOSES, score="s", prompts="p",
    held_out=tuple(range(8, PROMPTS)), controls=CONTROLS, shuffles=2, seed=0, max_tokens=10, tokens="all", sampling="",
)  # fmt: skip
Given = Callable[[Kind, int, int, float, int], tuple[float, float]]
"""Score and loss of a sample."""


def result(given: Given) -> DoseResult:
    """Return the result of a study in which layer 5 has the largest effect."""
    keys: list[tuple[Kind, int, int, float, int]] = [("plain", 0, -1, 0.0, n) for n in range(PROMPTS)]
    keys += [("vector", 0, layer, dose, n) for layer in LAYERS for dose in DOSES for n in range(8)]
    directions: list[tuple[Kind, int, int]] = [("vector", 0, 1), ("vector", 0, -1)]
    directions += [("random", i, 1) for i in range(CONTROLS)] + [("shuffled", i, 1) for i in range(2)]
    keys += [(kind, i, 5, sign * dose, n) for kind, i, sign in directions for dose in DOSES for n in STUDY.held_out]
    samples = []
    for key in keys:
        score, loss = given(*key)
        samples.append(Sample(*key, f"text {key}", float(score), float(loss), 10, 0.0))
    return DoseResult(STUDY, tuple(samples))


def effective(kind: Kind, number: int, layer: int, dose: float, prompt: int) -> tuple[float, float]:
    """Score as a vector that works at layer 5: more with the dose, incoherent from 0.4 on, beside a little noise."""
    noise = 0.1 * np.sin(7 * prompt + 3 * number + 11 * dose + layer)
    if kind == "vector":
        return 10 * dose * (2 if layer == 5 else 1) + noise, 2.0 if abs(dose) > 0.3 else 1.1
    return noise, 1.0


def random_as_good(kind: Kind, number: int, layer: int, dose: float, prompt: int) -> tuple[float, float]:
    return effective("vector" if (kind, number) == ("random", 7) else kind, 0, layer, dose, prompt)


def shuffled_as_good(kind: Kind, number: int, layer: int, dose: float, prompt: int) -> tuple[float, float]:
    return effective("vector" if (kind, number) == ("shuffled", 1) else kind, 0, layer, dose, prompt)


def test_a_score_that_never_changes_is_named() -> None:
    """Catches a probability of NaN for words that no text has, and no advice."""
    verdict = result(lambda *_: (0.0, 1.0)).verdict
    assert verdict.startswith("no better than random: the score is the same with and without steering on all held-out")
    assert "nan" not in verdict and "use words that occur in the texts" in verdict


def either_sign(kind: Kind, number: int, layer: int, dose: float, prompt: int) -> tuple[float, float]:
    return effective(kind, number, layer, abs(dose), prompt)


def one_prompt(kind: Kind, number: int, layer: int, dose: float, prompt: int) -> tuple[float, float]:
    score, loss = effective(kind, number, layer, dose, prompt)
    return (score * 8 if prompt in (0, 8) or kind != "vector" else 0.0), loss


def only_on_the_choice(kind: Kind, number: int, layer: int, dose: float, prompt: int) -> tuple[float, float]:
    return effective("plain" if prompt >= 8 else kind, number, layer, dose, prompt)


def wide_controls(kind: Kind, number: int, layer: int, dose: float, prompt: int) -> tuple[float, float]:
    score, loss = effective(kind, number, layer, dose, prompt)
    return (score + (1.8 * (-1) ** number if kind == "random" else 0) * 10 * dose), loss


def test_a_vector_that_works() -> None:
    """Catches a choice by the effect of incoherent text, and a range that includes doses where text breaks."""
    found = result(effective)
    assert found.chosen == (5, 0.2) and found.range == (0.1, 0.2) and found.outcome == "works"
    assert found.verdict.startswith("works: at layer 5 and dose 0.2, the score changes by +3.99 (95 % interval ")
    assert found.verdict.endswith("it holds in coherent text from dose 0.1 to 0.2, and 0% moved the wrong way")
    cell = found.at(0.2)
    assert cell.low < cell.effect < cell.high and cell.perplexity == pytest.approx(np.exp(0.1)) and cell.length == 1
    assert found.at(-0.2).effect == pytest.approx(-4, abs=0.2) and found.at(-0.2).wrong_way == 1
    assert len(found.controls(0.2)) == CONTROLS + 2
    described = repr(found)
    assert described == f"DoseResult(post_block of layers 3, 5, doses 0.1, 0.2, 0.4)\n{found.verdict}", "not each text"


@pytest.mark.parametrize(
    "given", [random_as_good, shuffled_as_good, either_sign, one_prompt, only_on_the_choice, wide_controls]
)
def test_effects_of_controls_are_no_better_than_random(given: Given) -> None:
    """Catches a verdict that overlooks a control, the interval, or that the numbers are those that chose."""
    found = result(given)
    assert found.outcome == "no better than random" and found.range is None
    assert found.verdict.startswith("no better than random: at layer 5 and dose 0.2, the score changes by ")


def test_few_controls_need_a_larger_distance() -> None:
    """Catches one bound of deviations for any number of controls, which 1 of 27 random vectors passes beside four."""
    for count, freedom_quantile in ((4, 5.8409), (8, 3.4995), (20, 2.8609)):  # Student's t, upper 0.5 %
        controls = np.arange(count, dtype=float)
        bound = controls.mean() + freedom_quantile * controls.std(ddof=1) * np.sqrt(1 + 1 / count)
        assert chance(bound, controls) == pytest.approx(0.005, rel=1e-3)
    assert chance(2, [1, 1, 1]) == 0 and np.isnan(chance(1, [1, 1, 1])) and chance(0, [1, 1]) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_random_controls_are_no_success(count: int) -> None:
    """Catches "works" where no deviation is known, and warnings of means of nothing."""
    assert np.isnan(chance(1.0, np.arange(count)))
    whole = result(effective)
    samples = tuple(each for each in whole.samples if each.kind != "random" or each.number < count)
    found = DoseResult(msgspec.structs.replace(STUDY, controls=count), samples)
    assert found.range is None and found.verdict.startswith("no better than random: ")
    assert whole.outcome == "works"


def test_incoherent_text_is_told() -> None:
    """Catches a vector that "works" although its text cannot be read."""

    def broken(kind: Kind, number: int, layer: int, dose: float, prompt: int) -> tuple[float, float]:
        return effective(kind, number, layer, dose, prompt)[0], 2.5 if kind == "vector" else 1.0

    found = result(broken)
    assert found.outcome == "incoherent" and "perplexity is 4.48 times" in found.verdict


def test_pictures_pages_and_tables(tmp_path: Path) -> None:
    """Catches a page that needs other files or runs the model's text, and a table without cells."""
    import pyarrow.parquet

    found = result(effective)
    texts = {("vector", 0, 5, 0.2, 9): "<script>alert(1)</script>"}
    samples = [msgspec.structs.replace(each, text=texts.get(each.key, each.text)) for each in found.samples]
    found = DoseResult(STUDY, tuple(samples))
    found.to_html(tmp_path / "dose.html")
    page = (tmp_path / "dose.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page and "http" not in page
    assert found.verdict in page and page.count("<tr>") > 80
    found.plot(tmp_path / "dose.png")
    assert (tmp_path / "dose.png").read_bytes()[:4] == b"\x89PNG"
    found.save(tmp_path / "dose.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "dose.parquet")
    assert table.num_rows == len(samples) and table.schema.metadata[b"verdict"] == found.verdict.encode()
    assert len(found.records()) == len(LAYERS) * len(DOSES) + len(DOSES) * (2 + CONTROLS + 2)


def test_an_interrupted_file_goes_on(tmp_path: Path) -> None:
    """Catches a line cut by a kill that stops the study or stays in the middle, and results counted twice."""
    path, samples = tmp_path / "dose.jsonl", result(effective).samples
    with closing(SampleFile(path, STUDY)) as first:
        first.add(samples[:5])
    with path.open("ab") as file:
        file.write(msgspec.json.encode(samples[5])[:30])
    again = SampleFile(path, STUDY)
    assert again.samples == list(samples[:5])
    again.add(samples[5:8])
    again.add(samples[5:6])
    assert read_samples(path)[:2] == (STUDY, list(samples[:8]))
    with pytest.raises(SteeringError, match="is of a study that did not end; run it again"):
        DoseResult.load(path)
    again.add(samples[8:])
    again.close()
    assert DoseResult.load(path).verdict == result(effective).verdict


def test_results_of_another_study_are_kept_apart(tmp_path: Path) -> None:
    """Catches texts of other prompts or doses in the results, a foreign file that is overwritten, and two writers."""
    path = tmp_path / "dose.jsonl"
    with closing(SampleFile(path, STUDY)), pytest.raises(SteeringError, match=r"out: a running process writes .*; end"):
        SampleFile(path, STUDY)
    with pytest.raises(SteeringError, match=r"other doses, seed\); use another file"):
        SampleFile(path, msgspec.structs.replace(STUDY, doses=(0.5,), seed=1))
    path.write_text('{"a": 1}\n')
    with pytest.raises(SteeringError, match="is not a file of a dose study"):
        SampleFile(path, STUDY)
    assert path.read_text() == '{"a": 1}\n'


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an error without advice, and earlier results that are lost."""
    samples = result(effective).samples
    file = SampleFile(tmp_path / "dose.jsonl", STUDY)
    file.add(samples[:3])

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(SteeringError, match=r"No space left on device; it has 3 results\. Make room and run"):
            file.add(samples[3:6])
    file.close()
    with closing(SampleFile(tmp_path / "dose.jsonl", STUDY)) as again:
        assert len(again.samples) >= 3


def test_scores_and_their_names() -> None:
    """Catches words in another case, parts of words, and equal names of scores that differ."""
    score = Keywords(["Happy", "joy"], ["sad"])
    assert score("", "Happy, HAPPY joys! Sad.") == 100 * (2 - 1) / 4 and score("", "") == 0
    for wrong in ([], ["two words"]):
        with pytest.raises(SteeringError, match=r"score\.positive"):
            Keywords(wrong)
    readout: dict[str, Any] = {"probe": np.ones(4), "point": "post_block", "layer": 1}
    hidden = [{"weights": np.ones((2, 4)) * scale, "outputs": np.ones(2)} for scale in (1, 2)]
    scores: list[Any] = [
        score, Keywords(["happy"]), ProbeScore(readout), ProbeScore({**readout, "layer": 2}),
        ProbeScore({**readout, "probe": np.zeros(4)}), repetition, ProbeScore({"probe": "calm/joy"}),
        ProbeScore({"probe": "calm/fun"}), *(ProbeScore({**readout, "probe": each}) for each in hidden),
    ]  # fmt: skip
    assert len({score_name(each) for each in scores}) == len(scores)
    for bad, words in (
        ("calm/joy", "score: must have a probe"),
        ({"probe": "calm"}, r"readouts\.score\.probe: must be"),
    ):
        with pytest.raises(SteeringError, match=words):
            ProbeScore(bad)  # type: ignore[arg-type]
    with pytest.raises(SteeringError, match="score: must be Keywords"):
        score_name("happy")  # type: ignore[arg-type]
    assert [repetition([1, 2]), repetition([1, 2, 3, 4]), repetition([1, 2, 3, 1, 2, 3])] == [0, 0, 0.25]
