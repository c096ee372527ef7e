# SPDX-License-Identifier: Apache-2.0
"""Scores of answers, and the metrics that are computed from them.

An answer of several tokens is scored as a sequence by teacher forcing: one request per token, whose prompt ends with
the answer's earlier tokens. Log-probabilities are those of the model itself, before temperature and penalties.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.request.scalars import read_choice, shown

MetricName = Literal["logprob", "logit_diff", "recovered", "kl"]
METRICS: tuple[MetricName, ...] = get_args(MetricName)
CUSTOM = "custom"
"""Name of a metric that is given as a callable."""

ANSWER, FOIL, KL, CALLED = range(4)
"""Columns of measures: log-probability of answer and foil, divergence from the clean run, value of the callable."""
NUM_MEASURES = 4
MIN_GAP = 1e-3
"""Smallest distance of clean and corrupt, in nats, by which `recovered` divides."""

Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Log-probabilities of one run, in nats; the argument of a metric that is given as a callable."""

    answer: float
    """Log-probability of the answer, over all of its tokens."""
    foil: float
    """Log-probability of the foil; NaN without a foil."""
    kl: float
    """Divergence of the clean distribution of the next token from this one; NaN if it was not requested."""
    next_token: Mapping[int, float]
    """Log-probabilities of tokens that directly follow the prompt: those that were scored."""


CustomMetric: TypeAlias = Callable[[LogProbs], float]


@dataclass(frozen=True)
class Targets:
    """Answer and foil of one pair, and how they are scored."""

    answer: tuple[int, ...]
    foil: tuple[int, ...] = ()
    """Empty if there is no foil."""

    @property
    def passes(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Forward passes: the tokens that follow the prompt, and the next tokens that are scored after them."""
        wanted: dict[tuple[int, ...], list[int]] = {(): []}
        for target in (self.answer, self.foil):
            for i, token in enumerate(target):
                after = wanted.setdefault(target[:i], [])
                if token not in after:
                    after.append(token)
        return tuple((suffix, tuple(tokens)) for suffix, tokens in wanted.items())

    def combine(
        self, scored: Sequence[Mapping[int, float]], clean: Mapping[int, float], custom: CustomMetric | None
    ) -> Array:
        """Return the measures of one run.

        Args:
            scored: Log-probabilities of each pass.
            clean: Log-probabilities of the clean run's next token; empty if the divergence is not wanted.
            custom: A metric of the user's.

        Raises:
            ValueError: The custom metric does not return a number.
        """
        after = {suffix: logprobs for (suffix, _), logprobs in zip(self.passes, scored, strict=True)}
        answer, foil = (self._sum(target, after) for target in (self.answer, self.foil))
        kl = divergence(clean, after[()]) if clean else math.nan
        called = math.nan
        if custom is not None:
            called = float(custom(LogProbs(answer, foil, kl, MappingProxyType(dict(after[()])))))
            if not math.isfinite(called):
                raise ValueError(f"the metric returned {called}")
        return np.array([answer, foil, kl, called])

    @staticmethod
    def _sum(target: tuple[int, ...], after: Mapping[tuple[int, ...], Mapping[int, float]]) -> float:
        return sum(after[target[:i]][token] for i, token in enumerate(target)) if target else math.nan


def divergence(clean: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return the Kullback-Leibler divergence of ``clean`` from ``other``, in nats.

    Tokens that only one of them lists are merged into one event with all other tokens. The result is the exact
    divergence if both list the whole vocabulary, and a lower bound of it otherwise.
    """
    common = [token for token in clean if token in other]
    p = np.exp([clean[token] for token in common])
    q = np.exp([other[token] for token in common])
    total = float(np.sum(p * (np.array([clean[t] - other[t] for t in common])))) if common else 0.0
    rest_p, rest_q = max(0.0, 1.0 - float(p.sum())), max(0.0, 1.0 - float(q.sum()))
    # Below the rounding of float32 log-probabilities, the rest is empty.
    if rest_p > 1e-6:
        total += rest_p * math.log(rest_p / max(rest_q, 1e-12))
    return max(total, 0.0)


def read_metric(value: object, *, has_foil: bool) -> tuple[str, CustomMetric | None]:
    """Return the name of a metric, and the callable if it is one.

    Raises:
        SteeringError: The metric does not exist, or needs a foil that is missing.
    """
    if callable(value):
        return CUSTOM, value
    name = read_choice(value, METRICS, "metric", what="a metric")
    if name == "logit_diff" and not has_foil:
        raise SteeringError("metric", "logit_diff needs a foil; give foil, or metric='logprob'")
    return name, None


def raw_metric(name: str, measures: Array) -> Array:
    """Return a metric other than ``recovered`` from measures ``[..., 4]``."""
    if name == "logprob":
        return measures[..., ANSWER]
    if name == "kl":
        return measures[..., KL]
    if name == CUSTOM:
        return measures[..., CALLED]
    difference: Array = measures[..., ANSWER] - measures[..., FOIL]
    return difference


def check_gaps(clean: Array, corrupt: Array, what: str) -> None:
    """Raise ``SteeringError`` if `recovered` would divide by a distance below ``MIN_GAP``.

    Args:
        clean: Metric of the clean run of each pair.
        corrupt: Metric of the corrupt run of each pair.
        what: Name of the metric, for the error.
    """
    for i, (high, low) in enumerate(zip(clean.tolist(), corrupt.tolist(), strict=True)):
        if not abs(high - low) > MIN_GAP:
            raise SteeringError(
                "metric",
                f"recovered divides by clean - corrupt, which is {high:.6g} - {low:.6g} = {high - low:.3g} ({what} of "
                f"pair {i}); it must exceed {MIN_GAP:g}. Use another pair, or metric={shown(what)}",
            )
