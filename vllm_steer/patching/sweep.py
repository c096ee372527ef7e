# SPDX-License-Identifier: Apache-2.0
"""Running the cells of a sweep, in an order that shares cached prefixes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import numpy as np

from vllm_steer.patching.metrics import NUM_MEASURES, Array, CustomMetric, Targets
from vllm_steer.patching.runner import Runner, Score, ScoreRequest
from vllm_steer.patching.settings import Settings
from vllm_steer.patching.sources import Source, cell_edits, random_control_edits
from vllm_steer.request import Edit

Cell: TypeAlias = tuple[int, int, int, int]
"""Indices of the case, the point, the span of layers and the column."""
Site: TypeAlias = tuple[int, int, int]
"""Indices of the case, the point and the span of layers."""

MISSING: Array = np.full(NUM_MEASURES, np.nan)
BATCH = 96
"""Cells that are submitted together, beside one unpatched run for each of their cases."""


@dataclass(frozen=True, eq=False)
class Case:
    """One run that is patched: a pair, and a draw of the noise."""

    tokens: tuple[int, ...]
    edits: tuple[Edit, ...]
    """Edits of the unpatched run, such as noise."""
    source: Source
    targets: Targets
    columns: tuple[tuple[int, ...], ...]
    """Positions that each column patches."""
    own_rows: Source | None = None
    """The unpatched run's own rows, for the control; None to leave the control out."""
    clean_next: Mapping[int, float] | None = None
    """Log-probabilities of the clean run's next token, for the divergence."""


@dataclass(frozen=True, eq=False)
class Sweep:
    """All cells of a grid."""

    settings: Settings
    cases: tuple[Case, ...]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Number of cases, points, spans of layers and columns."""
        return len(self.cases), len(self.settings.points), len(self.settings.layers), len(self.cases[0].columns)

    def cells(self) -> list[Cell]:
        """Return all cells, those of one case together and with descending positions.

        A cell shares the cached prefix of its case up to its first position. Descending positions use the end of that
        prefix first, which the cache would evict first.
        """
        cases, points, layers, columns = self.shape
        order = sorted(range(columns), key=lambda column: -self.cases[0].columns[column][0])
        return [
            (case, point, layer, column)
            for case, column, layer, point in product(range(cases), order, range(layers), range(points))
        ]


@dataclass(frozen=True, eq=False)
class Measured:
    """Result of one run."""

    measures: Array
    """Measures ``[4]``; NaN if the run failed."""
    error: str | None
    cached_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Results of the runs that were submitted together."""

    cells: Mapping[Cell, Measured]
    controls: Mapping[Site, Measured]
    """Unpatched runs with their own rows put in place, by case, point and span of layers."""
    repeats: Mapping[int, Measured]
    """Unpatched runs by case."""
    random: Mapping[Cell, Measured]
    """Cells with changes of the same norm in a random subspace; empty without subspaces."""


def run_batches(
    sweep: Sweep,
    runner: Runner,
    done: Collection[Cell] = (),
    only: Collection[Cell] | None = None,
    controlled: Collection[Site] = (),
) -> Iterator[Batch]:
    """Run the cells and yield their results, batch by batch.

    Args:
        sweep: The cells.
        runner: The engine.
        done: Cells to leave out because they have been run before.
        only: Cells to run; None for all.
        controlled: Controls to leave out because they have been run before.
    """
    cells = [cell for cell in sweep.cells() if cell not in done and (only is None or cell in only)]
    cases, points, layers, _ = sweep.shape
    controls = [
        site
        for site in product(range(cases), range(points), range(layers))
        if sweep.cases[site[0]].own_rows is not None and site not in controlled
    ]
    for start in range(0, max(len(cells), 1), BATCH):
        yield _run(sweep, runner, cells[start : start + BATCH], controls)
        controls = []


def measure(
    runner: Runner, cases: Sequence[tuple[Case, tuple[Edit, ...]]], custom: CustomMetric | None
) -> list[Measured]:
    """Run prompts with edits beside those of their cases, and return their measures."""
    requests: list[ScoreRequest] = []
    for case, edits in cases:
        for suffix, wanted in case.targets.passes:
            reference = tuple(case.clean_next) if case.clean_next is not None and not suffix else ()
            requests.append(ScoreRequest(case.tokens + suffix, case.edits + edits, wanted, reference))
    scores = iter(runner.score(requests))
    measured: list[Measured] = []
    for case, _ in cases:
        runner.check()
        measured.append(_measured(case, [next(scores) for _ in case.targets.passes], custom))
    return measured


def _run(sweep: Sweep, runner: Runner, cells: Sequence[Cell], controls: Sequence[Site]) -> Batch:
    settings = sweep.settings
    present = sorted({cell[0] for cell in cells} or range(len(sweep.cases)))
    failed: dict[Cell, Measured] = {}
    runs: list[tuple[Case, tuple[Edit, ...]]] = []
    kept: list[Cell] = []
    drawn: list[tuple[Case, tuple[Edit, ...]]] = []
    for cell in cells:
        runner.check()
        case = sweep.cases[cell[0]]
        place = settings.points[cell[1]], settings.layers[cell[2]], case.columns[cell[3]], settings.strength
        try:
            edits = cell_edits(case.source, *place, settings.subspaces)
            if settings.subspaces is not None and settings.random is not None and case.own_rows is not None:
                control = random_control_edits(case.source, case.own_rows, *place, settings.subspaces, settings.random)
                drawn.append((case, control))
        except ValueError as error:  # for example rows that are not finite
            failed[cell] = Measured(MISSING, str(error), 0, 0)
            continue
        runs.append((case, edits))
        kept.append(cell)
    for number, point, row in controls:
        runner.check()
        case = sweep.cases[number]
        if case.own_rows is not None:
            covered = sorted({position for column in case.columns for position in column})
            runs.append((case, cell_edits(case.own_rows, settings.points[point], settings.layers[row], covered, 1.0)))
    runs += [(sweep.cases[number], ()) for number in present]
    results = iter(measure(runner, runs + drawn, settings.custom))
    return Batch(
        {cell: next(results) for cell in kept} | failed,
        {control: next(results) for control in controls},
        {number: next(results) for number in present},
        {cell: next(results) for cell in kept} if drawn else {},
    )


def _measured(case: Case, scores: Sequence[Score], custom: CustomMetric | None) -> Measured:
    cached, total = (sum(getattr(score, name) for score in scores) for name in ("cached_tokens", "prompt_tokens"))
    error = next((score.error for score in scores if score.error is not None), None)
    if error is None:
        try:
            measures = case.targets.combine([score.logprobs for score in scores], case.clean_next or {}, custom)
            return Measured(measures, None, cached, total)
        except Exception as problem:  # of the metric, which is code of the user's
            error = f"{type(problem).__name__}: {problem}"
    return Measured(MISSING, error, cached, total)
