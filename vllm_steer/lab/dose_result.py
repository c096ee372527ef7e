# SPDX-License-Identifier: Apache-2.0
"""From the texts of a dose study to a verdict."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.lab.samples import Kind, Sample, Study, read_samples
from vllm_steer.lab.statistics import chance
from vllm_steer.patching.statistics import summarise

MAX_PERPLEXITY = 2.0
"""Largest perplexity of coherent text under the model without steering, in perplexities of plain text."""
MAX_REPETITION = 0.3
"""Most that repetition may increase in coherent text."""
MAX_CHANCE = 0.005
"""Largest probability that a random direction has such an effect: 2.9 standard deviations above 20, 6.5 above 4."""
Outcome = Literal["works", "no better than random", "incoherent"]


@dataclass(frozen=True)
class CellResult:
    """Texts of one direction, layer and dose against the plain texts of the same prompts."""

    kind: Kind
    number: int
    layer: int
    dose: float
    prompts: int
    effect: float
    """Mean change of the score."""
    low: float
    """Lower end of the bootstrap interval of the effect over the prompts, with 95 % coverage."""
    high: float
    wrong_way: float
    """Share of the prompts whose score decreased."""
    perplexity: float
    """Relative to the plain texts."""
    repetition: float
    """Change of the share of repeated runs of tokens."""
    length: float
    """Tokens per text, relative to the plain texts."""

    @property
    def coherent(self) -> bool:
        """Whether perplexity and repetition are within their limits."""
        return self.perplexity <= MAX_PERPLEXITY and self.repetition <= MAX_REPETITION


def results_of(study: Study, samples: Sequence[Sample], prompts: Collection[int]) -> list[CellResult]:
    """Return the results of each direction, layer and dose on some prompts, all of which have their texts."""
    by_cell: dict[tuple[Kind, int, int, float], list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: (sample.prompt, sample.key)):
        if sample.prompt in prompts:
            by_cell.setdefault(sample.key[:4], []).append(sample)
    plain = by_cell.pop(("plain", 0, -1, 0.0))
    effects = np.array([[sample.score for sample in each] for each in by_cell.values()])
    effects -= np.array([sample.score for sample in plain])
    statistics = summarise(effects.T, seed=study.seed)
    found = []
    for i, (cell, each) in enumerate(by_cell.items()):
        costs = (
            _perplexity(each) / _perplexity(plain),
            float(np.mean([s.repetition for s in each]) - np.mean([s.repetition for s in plain])),
            sum(s.tokens for s in each) / max(1, sum(s.tokens for s in plain)),
        )
        shares = (float(statistics.low[i]), float(statistics.high[i]), float((effects[i] < 0).mean()))
        found.append(CellResult(*cell, len(each), float(effects[i].mean()), *shares, *costs))
    return found


def _perplexity(samples: Sequence[Sample]) -> float:
    """Return the perplexity of all tokens; infinity if there are none."""
    tokens = sum(sample.tokens for sample in samples)
    total = sum(sample.loss * sample.tokens for sample in samples if sample.loss is not None)
    return float(np.exp(total / tokens)) if tokens else float("inf")


@dataclass(frozen=True, eq=False, repr=False)
class DoseResult:
    """Results of a dose study. The verdict uses the held-out prompts."""

    study: Study
    samples: tuple[Sample, ...]

    def __repr__(self) -> str:
        study = self.study
        sites = f"{study.point} of layers {', '.join(map(str, study.layers))}"
        return f"DoseResult({sites}, doses {', '.join(f'{each:g}' for each in study.doses)})\n{self.verdict}"

    @classmethod
    def load(cls, path: str | Path) -> DoseResult:
        """Read a file of results; raise SteeringError if it has not all of them."""
        study, samples, _ = read_samples(path)
        needed = len(study.held_out) * len(study.doses) * (2 + study.controls + study.shuffles)
        if sum(sample.prompt in study.held_out and sample.kind != "plain" for sample in samples) < needed:
            raise SteeringError("results", f"{path} is of a study that did not end; run it again, and it goes on")
        return cls(study, tuple(samples))

    @cached_property
    def choice(self) -> list[CellResult]:
        """All layers and doses on the prompts that choose."""
        others = {sample.prompt for sample in self.samples} - set(self.study.held_out)
        return results_of(self.study, self.samples, others)

    @cached_property
    def held_out(self) -> list[CellResult]:
        """The chosen layer, with all doses, signs and controls, on the held-out prompts."""
        return results_of(self.study, self.samples, self.study.held_out)

    @cached_property
    def chosen(self) -> tuple[int, float]:
        """The layer and dose with the largest effect of coherent text, on the prompts that choose.

        If no text is coherent, it is the one with the smallest perplexity.
        """
        if coherent := [each for each in self.choice if each.coherent]:
            best = max(coherent, key=lambda each: (each.effect, -each.dose))
        else:
            best = min(self.choice, key=lambda each: each.perplexity)
        return best.layer, best.dose

    def at(self, dose: float) -> CellResult:
        """Return the result of the vector at a dose of the chosen layer; with the opposite sign if it is negative."""
        return next(each for each in self.held_out if each.kind == "vector" and each.dose == dose)

    def controls(self, dose: float) -> list[CellResult]:
        """Return the results of the random directions and of the shuffled labels at a dose."""
        return [each for each in self.held_out if each.kind != "vector" and each.dose == dose]

    def better_than_controls(self, dose: float) -> bool:
        """Return whether the effect at a dose is positive, above each control's, and far above the random ones'."""
        cell, others = self.at(dose), self.controls(dose)
        above = cell.effect > max(self.at(-dose).effect, *(each.effect for each in others))
        return above and cell.low > 0 and self.chance(dose) <= MAX_CHANCE

    def chance(self, dose: float) -> float:
        """Return the probability that a random direction has at least the vector's effect at a dose."""
        random = [each.effect for each in self.controls(dose) if each.kind == "random"]
        return chance(self.at(dose).effect, random)

    @cached_property
    def range(self) -> tuple[float, float] | None:
        """The doses around the chosen one at which the effect holds and text stays coherent; None if it is none."""
        doses = self.study.doses
        holds = [self.better_than_controls(dose) and self.at(dose).coherent for dose in doses]
        first = last = doses.index(self.chosen[1])
        if not holds[first]:
            return None
        while first and holds[first - 1]:
            first -= 1
        while last + 1 < len(doses) and holds[last + 1]:
            last += 1
        return doses[first], doses[last]

    @property
    def outcome(self) -> Outcome:
        """The verdict in a word."""
        if not self.better_than_controls(self.chosen[1]):
            return "no better than random"
        return "works" if self.range is not None else "incoherent"

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        if not any(each.effect or each.low or each.high for each in self.held_out):
            problem = "the score is the same with and without steering on all held-out prompts"
            return f"{self.outcome}: {problem}; use words that occur in the texts, longer texts or another score"
        layer, dose = self.chosen
        cell, others = self.at(dose), [each.effect for each in self.controls(dose)]
        moved = f"the score changes by {cell.effect:+.3g} (95 % interval {cell.low:+.3g} to {cell.high:+.3g})"
        begin = f"{self.outcome}: at layer {layer} and dose {dose:g}, {moved} on {cell.prompts} held-out prompts, "
        begin += f"{len(others)} controls of the same length by {min(others):+.3g} to {max(others):+.3g}"
        begin += f" (a random direction has this effect with probability {self.chance(dose):.2g})"
        if self.outcome == "no better than random":
            return f"{begin}, the opposite sign by {self.at(-dose).effect:+.3g}"
        if self.range is None:
            return f"{begin}, but perplexity is {cell.perplexity:.3g} times that of plain text"
        low, high = self.range
        span = f"at dose {low:g} only" if low == high else f"from dose {low:g} to {high:g}"
        return f"{begin}; it holds in coherent text {span}, and {cell.wrong_way:.0%} moved the wrong way"

    def records(self) -> list[dict[str, Any]]:
        """Return a row of numbers for each cell, of the choice and of the held-out prompts."""
        parts = (("choice", self.choice), ("held out", self.held_out))
        return [{"prompts_of": name, **vars(each), "coherent": each.coherent} for name, part in parts for each in part]

    def save(self, path: str | Path) -> None:
        """Write all texts with their scores, the study and the verdict as Parquet."""
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pylist([msgspec.to_builtins(sample) for sample in self.samples])
        about = {b"vllm_steer.dose": msgspec.json.encode(self.study), b"verdict": self.verdict.encode()}
        pyarrow.parquet.write_table(table.replace_schema_metadata(about), path)

    def plot(self, path: str | Path) -> None:
        """Write the picture: effect against dose beside the controls, and against perplexity. Needs matplotlib."""
        from vllm_steer.lab.dose_report import picture

        Path(path).write_bytes(picture(self, Path(path).suffix.removeprefix(".") or "png"))

    def to_html(self, path: str | Path) -> None:
        """Write one page with the verdict, the picture, all numbers and some texts. Needs matplotlib."""
        from vllm_steer.lab.dose_report import page

        Path(path).write_text(page(self), encoding="utf-8")
