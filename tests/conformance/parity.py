# SPDX-License-Identifier: Apache-2.0
"""One architecture in one mode: ask the engine, run the same in HF Transformers, compare.

Compared are log-probabilities (natural logarithm) of the whole vocabulary, after each token of the prompt and each
generated token but the last, on the sequence that the engine generated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.conformance.branches import BRANCHES, served_branches
from tests.conformance.cases import LAYER, PROMPTS, STREAM_AT, TRACED_AT, Case, cases_for
from tests.conformance.edits import EditAt, Formula
from tests.conformance.engine import Answer, ask, layer_classes, running
from tests.conformance.model import HIDDEN, LAYERS, TinyModel
from tests.conformance.reference_process import ReferenceProcess

TOLERANCE = 1e-4
"""Largest difference of a log-probability that counts as agreement."""
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
        """Whether the engine gave what HF gives. A missing value is no agreement."""
        return self.error < TOLERANCE


@dataclass(frozen=True)
class Refusal:
    """How the engine took an edit that it cannot make: the error's text, None where it raised none."""

    point: str
    error: str | None


@dataclass(frozen=True)
class Report:
    """All that was seen of one architecture in one mode."""

    tiny: TinyModel
    mode: str
    layers: set[str]
    outcomes: list[Outcome]
    refusals: list[Refusal]
    after_refusal: Outcome
    start_seconds: float

    def worst(self, point: str) -> float:
        """Largest error of the cases that edit this point."""
        return max(outcome.error for outcome in self.outcomes if point in outcome.case.points)

    def worst_row(self, point: str) -> float:
        """Largest distance of a row captured at this point, in lengths of HF's row."""
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
    """Run the cases of ``tiny`` that ``keep`` keeps, and every refusal.

    ``with_branches``: in an engine that has all points; else in one that has those on the stream.
    """
    branches = served_branches(tiny) if with_branches else ()
    path = reference.save(tiny.name, folder)
    plain = reference.traces(tiny.name, [(PROMPTS[0], len(PROMPTS[0]), ())])[0]
    cases = [case for case in cases_for(tiny, plain, branches) if keep(case)]
    started = time.perf_counter()
    with running(tiny, path, mode, BRANCHES if with_branches else ()) as llm:
        start_seconds = time.perf_counter() - started
        answers = ask(llm, cases, (*(point for point in STREAM_AT if point not in tiny.unread), *branches))
        refusals = [Refusal(point, _refusal(llm, point)) for point in (*tiny.refused, *(set(BRANCHES) - set(branches)))]
        after = Case("plain after the refusals", PROMPTS[0])
        answers += ask(llm, [after])
        layers = layer_classes(llm)
    *outcomes, after_refusal = compare(tiny, reference, [*cases, after], answers)
    return Report(tiny, mode, layers, outcomes, refusals, after_refusal, start_seconds)


def compare(
    tiny: TinyModel, reference: ReferenceProcess, cases: Sequence[Case], answers: Sequence[Answer]
) -> list[Outcome]:
    """Each answer against HF with the same edits on the same tokens, and that against HF without edits."""
    pairs = list(zip(cases, answers, strict=True))
    edited = reference.traces(tiny.name, [(a.token_ids, len(c.prompt), c.edits) for c, a in pairs])
    plain = reference.traces(tiny.name, [(a.token_ids, len(c.prompt), ()) for c, a in pairs])
    return [
        Outcome(
            case,
            _far(answer.logprobs, with_.logprobs[:-1]),
            _far(with_.logprobs[:-1], without.logprobs[:-1]),
            {p: _rows_far(rows, getattr(with_, TRACED_AT[p])[:, :-1]) for p, rows in answer.streams.items()},
        )
        for (case, answer), with_, without in zip(pairs, edited, plain, strict=True)
    ]


def _far(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max())


def _rows_far(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float((np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)).max())


def _refusal(llm: object, point: str) -> str | None:
    edit = EditAt(Formula("add", np.ones(HIDDEN, np.float32)), point, LAYER)
    everywhere = EditAt(Formula("add", np.ones(HIDDEN, np.float32)), point, tuple(range(LAYERS)))
    said = []
    for refused in (edit, everywhere):
        try:
            ask(llm, [Case("a plain request in the same call", PROMPTS[1]), Case(point, PROMPTS[0], (refused,))])
        except ValueError as error:
            said.append(str(error))
        else:
            return None
    return said[0]
