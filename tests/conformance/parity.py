# SPDX-License-Identifier: Apache-2.0
"""Compare one architecture in one mode with HF Transformers on the sequences that the engine generates.

Compared are log-probabilities (natural logarithm) of the whole vocabulary, after each token of the prompt and each
generated token but the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.conformance.branches import BRANCHES, supported_branches
from tests.conformance.cases import LAYER, PROMPTS, STREAM_FIELDS, TRACE_FIELDS, Case, cases_for
from tests.conformance.edits import EditAt, Formula
from tests.conformance.engine import Answer, generate, layer_classes, steered_engine
from tests.conformance.model import HIDDEN, LAYERS, TinyModel
from tests.conformance.reference_process import ReferenceProcess

TOLERANCE = 2e-4
"""Largest difference of a log-probability that counts as agreement. An edited token's stream is rounded once more, in
one summand, than HF's: with latent attention and experts (`glm4_moe_lite`) that reaches 1.2e-4 in float32."""
MIN_EFFECT = 1e-2
"""Least change that an edit must make for its agreement to mean anything."""


@dataclass(frozen=True)
class Outcome:
    """One case: its largest ``error`` against HF, and the ``effect`` of its edits in HF alone.

    ``value_errors``: per point, the largest distance of a captured row from HF's, in lengths of HF's row.
    """

    case: Case
    error: float
    effect: float
    value_errors: Mapping[str, float]

    @property
    def agrees(self) -> bool:
        """Whether the engine agrees with HF; a missing value does not count as agreement."""
        return self.error < TOLERANCE


@dataclass(frozen=True)
class Refusal:
    """Reaction of the engine to an edit that it must refuse: the text of the error, or None if it raised none."""

    point: str
    error: str | None


@dataclass(frozen=True)
class Report:
    """Results of one architecture in one mode."""

    tiny: TinyModel
    mode: str
    layers: set[str]
    outcomes: list[Outcome]
    refusals: list[Refusal]
    after_refusal: Outcome
    start_seconds: float

    def worst(self, point: str) -> float:
        """Return the largest error of the cases that edit this point."""
        return max(outcome.error for outcome in self.outcomes if point in outcome.case.points)

    def worst_row(self, point: str) -> float:
        """Return the largest distance of a row captured at this point, in lengths of HF's row."""
        return max(outcome.value_errors[point] for outcome in self.outcomes if point in outcome.value_errors)

    @property
    def worst_plain(self) -> float:
        """Largest error of the plain requests in the batch."""
        return max(outcome.error for outcome in self.outcomes if not outcome.case.edits)


def examine(
    tiny: TinyModel,
    mode: str,
    folder: Path,
    reference: ReferenceProcess,
    keep: Callable[[Case], bool] = lambda case: True,
    with_branches: bool = True,
) -> Report:
    """Run the cases of ``tiny`` and every refusal.

    Args:
        tiny: The architecture.
        mode: A key of ``engine.MODES``.
        folder: Where models are saved.
        reference: The process that runs HF Transformers.
        keep: Selects cases.
        with_branches: Whether the engine has the optional points.
    """
    branches = supported_branches(tiny) if with_branches else ()
    path = reference.save(tiny.name, folder)
    plain = reference.traces(tiny.name, [(PROMPTS[0], len(PROMPTS[0]), ())])[0]
    cases = [case for case in cases_for(tiny, plain, branches) if keep(case)]
    started = time.perf_counter()
    with steered_engine(tiny, path, mode, BRANCHES if with_branches else ()) as llm:
        start_seconds = time.perf_counter() - started
        answers = generate(llm, cases, (*(point for point in STREAM_FIELDS if point not in tiny.unread), *branches))
        refusals = [Refusal(point, _refusal(llm, point)) for point in (*tiny.refused, *(set(BRANCHES) - set(branches)))]
        after = Case("plain after the refusals", PROMPTS[0])
        answers += generate(llm, [after])
        layers = layer_classes(llm)
    *outcomes, after_refusal = compare(tiny, reference, [*cases, after], answers)
    return Report(tiny, mode, layers, outcomes, refusals, after_refusal, start_seconds)


def compare(
    tiny: TinyModel, reference: ReferenceProcess, cases: Sequence[Case], answers: Sequence[Answer]
) -> list[Outcome]:
    """Compare each answer with HF under the same edits on the same tokens, and HF with and without the edits."""
    pairs = list(zip(cases, answers, strict=True))
    edited = reference.traces(tiny.name, [(a.token_ids, len(c.prompt), c.edits) for c, a in pairs])
    plain = reference.traces(tiny.name, [(a.token_ids, len(c.prompt), ()) for c, a in pairs])
    return [
        Outcome(
            case,
            _distance(answer.logprobs, with_.logprobs[:-1]),
            _distance(with_.logprobs[:-1], without.logprobs[:-1]),
            {p: _row_distance(rows, getattr(with_, TRACE_FIELDS[p])[:, :-1]) for p, rows in answer.streams.items()},
        )
        for (case, answer), with_, without in zip(pairs, edited, plain, strict=True)
    ]


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max())


def _row_distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float((np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)).max())


def _refusal(llm: object, point: str) -> str | None:
    edit = EditAt(Formula("add", np.ones(HIDDEN, np.float32)), point, LAYER)
    everywhere = EditAt(Formula("add", np.ones(HIDDEN, np.float32)), point, tuple(range(LAYERS)))
    errors = []
    for refused in (edit, everywhere):
        try:
            generate(llm, [Case("a plain request in the same call", PROMPTS[1]), Case(point, PROMPTS[0], (refused,))])
        except ValueError as error:
            errors.append(str(error))
        else:
            return None
    return errors[0]
