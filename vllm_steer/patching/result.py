# SPDX-License-Identifier: Apache-2.0
"""Results of a sweep."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError, install_hint
from vllm_steer.patching.header import SweepInfo
from vllm_steer.patching.metrics import CUSTOM, METRICS, NUM_MEASURES, Array, check_gaps, raw_metric
from vllm_steer.patching.statistics import GridStatistics, summarise
from vllm_steer.patching.sweep import Batch, Cell, Measured, Site
from vllm_steer.request.scalars import read_choice


@dataclass(eq=False)
class PatchingResult:
    """Grids of a sweep, and the noise that they are to be compared with.

    A grid has one row per layer (or span of layers) and one column per position (or span of positions). Grids are means
    over the pairs and over the draws of the noise. A cell is NaN if it failed or has not been run; `errors` has the
    reasons.

    Examples:
        >>> result = study.sweep(points=["post_block"])  # doctest: +SKIP
        >>> result.grid("post_block").shape, result.noise_floor(), result.cache_hit_rate  # doctest: +SKIP
    """

    info: SweepInfo
    """Description of the sweep."""
    clean: Array
    """Measures of the clean run, ``[cases, 4]``. Measures are the log-probabilities of answer and foil, the divergence
    from the clean run and the value of a metric that is a callable. There are ``pairs x draws`` cases."""
    corrupt: Array
    """Measures of the corrupt run, ``[cases, 4]``; NaN for ablations, which have none."""
    cells: Array
    """Measures of the cells, ``[cases, points, rows, columns, 4]``."""
    controls: Array
    """Measures of the control, ``[cases, points, rows, 4]``: the unpatched run with its own rows put in place at all
    columns."""
    repeats: list[tuple[int, Array]] = field(default_factory=list)
    """Measures of the unpatched runs that ran in the batches of the cells, with their cases."""
    errors: dict[Cell, str] = field(default_factory=dict)
    """Reasons why cells failed, by case, point, row and column."""
    random: Array = field(default_factory=lambda: np.empty(0))
    """Measures of the cells with changes of the same norm in a random subspace, in the shape of ``cells``; empty if the
    sweep patched whole rows or had no control."""
    cached_tokens: int = 0
    """Prompt tokens of all requests that came from the prefix cache."""
    prompt_tokens: int = 0
    """Prompt tokens of all requests."""
    control_errors: dict[Cell, str] = field(default_factory=dict)
    """Reasons why the controls with a random subspace failed; their cells may have values."""
    not_run: dict[Cell, str] = field(default_factory=dict)
    """Reasons why `PatchingStudy.coarse_to_fine` did not run a cell, which has not failed."""

    @classmethod
    def empty(cls, info: SweepInfo, clean: Array, corrupt: Array) -> PatchingResult:
        """Return a result without cells."""
        shape = (len(clean), len(info.points), len(info.layers), len(info.pairs[0].columns))
        return cls(
            info,
            clean,
            corrupt,
            np.full((*shape, NUM_MEASURES), np.nan),
            np.full((*shape[:3], NUM_MEASURES), np.nan),
            random=np.full((*shape, NUM_MEASURES) if info.random_control else 0, np.nan),
        )

    def add(self, batch: Batch) -> None:
        """Enter the results of a batch."""
        for array, errors, found in (
            (self.cells, self.errors, batch.cells), (self.random, self.control_errors, batch.random)
        ):  # fmt: skip
            for cell, measured in found.items():
                array[cell] = measured.measures
                errors.pop(cell, None)
                if measured.error is not None:
                    errors[cell] = measured.error
                self._count(measured)
        for site, measured in batch.controls.items():
            self.controls[site] = measured.measures
            self._count(measured)
        for case, measured in batch.repeats.items():
            if measured.error is None:
                self.repeats.append((case, measured.measures))
            self._count(measured)

    def _count(self, measured: Measured) -> None:
        self.cached_tokens += measured.cached_tokens
        self.prompt_tokens += measured.prompt_tokens

    @property
    def unpatched(self) -> Array:
        """Measures of the run that is patched, ``[cases, 4]``: corrupt if denoising, otherwise clean."""
        return self.corrupt if self.info.direction == "denoising" else self.clean

    @property
    def finished(self) -> set[Cell]:
        """Cells that have values, also of their control in a random subspace if the sweep has it."""
        there = ~np.isnan(self.cells[..., 0])
        if self.info.random_control:
            there &= ~np.isnan(self.random[..., 0])
        return {tuple(index) for index in np.argwhere(there).tolist()}

    @property
    def controlled(self) -> set[Site]:
        """Controls that have values."""
        return {tuple(index) for index in np.argwhere(~np.isnan(self.controls[..., 0])).tolist()}

    @property
    def cache_hit_rate(self) -> float:
        """Share of the requests' prompt tokens that came from the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def grid(self, point: str, metric: str | None = None, *, random: bool = False) -> npt.NDArray[np.float32]:
        """Return a grid, float32 ``[rows, columns]``.

        Args:
            point: A hook point of the sweep.
            metric: ``"logprob"``, ``"logit_diff"``, ``"recovered"``, ``"kl"`` or ``"custom"``; the sweep's by default.
                ``recovered`` is (cell - corrupt) / (clean - corrupt): 0 as corrupt, 1 as clean, in both directions.
                It is NaN if clean and corrupt of a pair are closer than the noise floor; see `too_close`.
            random: Return the control of a sweep with ``subspace``: the same cells with changes of the same norm in a
                random subspace.

        Raises:
            SteeringError: The sweep lacks the point, the metric or the control, or clean and corrupt are equal.
        """
        return _mean(self.values(metric, random=random)[:, self._point(point)])

    def values(self, metric: str | None = None, *, random: bool = False) -> Array:
        """Return the metric of each pair, ``[pairs, points, rows, columns]``; see `grid`."""
        name = self._metric(metric)
        if random and not self.info.random_control:
            raise SteeringError(
                "random", "the sweep had no control with a random subspace: it needs subspace and control"
            )
        cells = self._over_draws(raw_metric(self._basis(name), self.random if random else self.cells))
        if name != "recovered":
            return cells
        clean, corrupt = self._ends()
        check_gaps(clean, corrupt, self._basis(name))
        gaps = np.where(self._far_apart(), clean - corrupt, np.nan)
        shape = (-1, 1, 1, 1)
        recovered: Array = (cells - corrupt.reshape(shape)) / gaps.reshape(shape)
        return recovered

    def too_close(self) -> list[dict[str, Any]]:
        """Return the pairs whose ``recovered`` is missing, because clean and corrupt are within the noise."""
        clean, corrupt = self._ends()
        least = self._noise(self._basis("recovered"))
        return [
            {"pair": i, "clean": float(clean[i]), "corrupt": float(corrupt[i]), "noise_floor": least}
            for i, apart in enumerate(self._far_apart())
            if not apart
        ]

    def cell_value(self, case: int, measures: Array) -> float:
        """Return the sweep's metric for the measures of one cell of a case."""
        value = float(raw_metric(self._basis(self.info.metric), measures))
        if self.info.metric != "recovered":
            return value
        pair = case // self.info.draws
        clean, corrupt = (float(each[pair]) for each in self._ends())
        return (value - corrupt) / (clean - corrupt) if self._far_apart()[pair] else float("nan")

    def unpatched_values(self) -> tuple[str, float, float]:
        """Return the metric that is measured, and its mean over the clean and over the corrupt runs.

        It is the sweep's metric; for ``recovered``, the metric that it normalises. NaN for the corrupt runs of an
        ablation.
        """
        name = self._basis(self.info.metric)
        return name, float(raw_metric(name, self.clean).mean()), float(raw_metric(name, self.corrupt).mean())

    def effects(self, metric: str | None = None, *, random: bool = False) -> Array:
        """Return the metric of each pair minus that of the unpatched run, ``[pairs, points, rows, columns]``."""
        name = self._metric(metric)
        return self.values(name, random=random) - self.baseline(name).reshape(-1, 1, 1, 1)

    def effect(self, point: str, metric: str | None = None, *, random: bool = False) -> npt.NDArray[np.float32]:
        """Return the mean effect of each cell, float32 ``[rows, columns]``; the arguments are those of `grid`."""
        return _mean(self.effects(metric, random=random)[:, self._point(point)])

    def baseline(self, metric: str | None = None) -> Array:
        """Return the metric of the unpatched run, ``[pairs]``."""
        name = self._metric(metric)
        if name == "recovered":
            return np.full(len(self.info.pairs), 0.0 if self.info.direction == "denoising" else 1.0)
        return self._over_draws(raw_metric(name, self.unpatched))

    def statistics(
        self, point: str, metric: str | None = None, *, confidence: float = 0.95, seed: int = 0
    ) -> GridStatistics:
        """Return effect, standard error, bootstrap interval and permutation p-value of each cell over the pairs.

        Args:
            point: A hook point of the sweep.
            metric: As for `grid`.
            confidence: Coverage of the interval.
            seed: Seed of the resampling.
        """
        return summarise(self.effects(metric)[:, self._point(point)], confidence, seed)

    def noise_floor(self, metric: str | None = None) -> float:
        """Return the noise of unpatched runs.

        It is the largest distance of an unpatched run in the cells' batches from the unpatched run before the sweep.
        For ``recovered``, it is divided by the least distance of clean and corrupt.

        Raises:
            SteeringError: The sweep lacks the metric, or ``recovered`` would divide by zero.
        """
        name = self._metric(metric)
        noise = self._noise(self._basis(name))
        return noise / self._least_gap() if name == "recovered" else noise

    def control(self, metric: str | None = None) -> float:
        """Return the largest effect of the control, which puts the unpatched run's own rows in place.

        It is zero but for rounding. NaN if the control was left out.
        """
        name = self._metric(metric)
        raw = self._basis(name)
        distance = np.abs(raw_metric(raw, self.controls) - raw_metric(raw, self.unpatched)[:, None, None])
        if np.isnan(distance).all():
            return float("nan")
        largest = float(np.nanmax(distance))
        return largest / self._least_gap() if name == "recovered" else largest

    def random_control(self, metric: str | None = None) -> float:
        """Return the largest effect of the cells in a random subspace; NaN if the sweep had no such control."""
        if not self.info.random_control:
            return float("nan")
        effects = np.abs(self.effects(metric, random=True).mean(axis=0))
        return float("nan") if np.isnan(effects).all() else float(np.nanmax(effects))

    def below_floor(self, point: str, metric: str | None = None) -> npt.NDArray[np.bool_]:
        """Mark cells whose effect is at most the larger of `noise_floor` and `control`, bool ``[rows, columns]``."""
        control = self.control(metric)
        floor = max(self.noise_floor(metric), 0.0 if np.isnan(control) else control)
        marked: npt.NDArray[np.bool_] = np.abs(self.effects(metric)[:, self._point(point)].mean(axis=0)) <= floor
        return marked

    def failed(self) -> list[dict[str, Any]]:
        """Return place and reason of each failed cell, without the cells of `not_run`."""
        return [
            {"pair": case // self.info.draws, **self.place(*place), "error": reason}
            for (case, *place), reason in sorted(self.errors.items())
        ]

    def place(self, point: int, row: int, column: int) -> dict[str, str]:
        """Return the names of a cell's place."""
        names = {"point": self.info.points[point], "layer": self.info.row_names[row]}
        return {**names, "position": self.info.column_names[column]}

    def records(self, metric: str | None = None) -> list[dict[str, Any]]:
        """Return one dict per cell, with the value, the effect and the statistics over the pairs."""
        reasons: dict[tuple[int, ...], str] = {
            cell[1:]: reason for cell, reason in (*self.not_run.items(), *self.errors.items())
        }
        rows: list[dict[str, Any]] = []
        for number, point in enumerate(self.info.points):
            marked, stats = self.below_floor(point, metric), self.statistics(point, metric)
            columns = {"value": self.grid(point, metric)}
            columns |= {name: getattr(stats, name) for name in ("effect", "standard_error", "low", "high", "p_value")}
            rows += [
                {
                    **self.place(number, row, column),
                    **{name: float(each[row, column]) for name, each in columns.items()},
                    "below_floor": bool(marked[row, column]),
                    "error": reasons.get((number, row, column)),
                }
                for row, column in np.ndindex(marked.shape)
            ]
        return rows

    def to_pandas(self, metric: str | None = None) -> Any:
        """Return `records` as a DataFrame; raise ``ImportError`` if pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(f"data frames need pandas; {install_hint('patching')}") from error

        return pandas.DataFrame(self.records(metric))

    def plot(self, path: str | Path, metric: str | None = None) -> None:
        """Write heat maps of all points to an image file; needs matplotlib."""
        from vllm_steer.patching.plot import plot

        plot(self, Path(path), self._metric(metric))

    def to_html(self, path: str | Path | None = None, metric: str | None = None) -> str:
        """Return the grids as an HTML page without scripts; also write it to ``path``, replacing an existing file."""
        from vllm_steer.patching.plot import page

        if isinstance(path, str) and path in METRICS:
            raise TypeError(f"{path!r} is a metric; use to_html(metric={path!r})")
        text = page(self, self._metric(metric))
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, replacing an existing one."""
        from vllm_steer.patching.file import save

        save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> PatchingResult:
        """Read a file of `save`; raise ``SteeringError`` if it is not one."""
        from vllm_steer.patching.file import load

        return load(Path(path))

    def _metric(self, metric: str | None) -> str:
        name = (
            self.info.metric if metric is None else read_choice(metric, (*METRICS, CUSTOM), "metric", what="a metric")
        )
        if name == "logit_diff" and not self.info.has_foil:
            raise SteeringError("metric", "logit_diff needs a foil, and the pairs have none; use logprob")
        if name == "kl" and not self.info.kl_tokens:
            raise SteeringError("metric", "the sweep did not measure kl; run it with kl_tokens or metric='kl'")
        if name == CUSTOM and self.info.metric != CUSTOM:
            raise SteeringError(
                "metric", f"the sweep ran with metric={self.info.metric!r}; run it with your function as metric"
            )
        if name == "recovered" and self.info.direction == "ablation":
            raise SteeringError("metric", "recovered needs a corrupt run, and an ablation has none; use logit_diff")
        return name

    def _basis(self, name: str) -> str:
        """Return the metric that ``recovered`` normalises, and other metrics unchanged."""
        if name != "recovered":
            return name
        if self.info.metric == CUSTOM:
            return CUSTOM
        return "logit_diff" if self.info.has_foil else "logprob"

    def _over_draws(self, values: Array) -> Array:
        mean: Array = values.reshape(len(self.info.pairs), self.info.draws, *values.shape[1:]).mean(axis=1)
        return mean

    def _ends(self) -> tuple[Array, Array]:
        basis = self._basis("recovered")
        return self._over_draws(raw_metric(basis, self.clean)), self._over_draws(raw_metric(basis, self.corrupt))

    def _far_apart(self) -> npt.NDArray[np.bool_]:
        """Return the pairs whose clean and corrupt runs differ by more than the noise."""
        clean, corrupt = self._ends()
        apart: npt.NDArray[np.bool_] = np.abs(clean - corrupt) > self._noise(self._basis("recovered"))
        return apart

    def _least_gap(self) -> float:
        clean, corrupt = self._ends()
        check_gaps(clean, corrupt, self._basis("recovered"))
        return float(np.abs(clean - corrupt).min())

    def _noise(self, raw: str) -> float:
        base = raw_metric(raw, self.unpatched)
        distances = [abs(float(raw_metric(raw, measures)) - float(base[case])) for case, measures in self.repeats]
        return max(distances, default=0.0)

    def _point(self, point: str) -> int:
        return self.info.points.index(read_choice(point, self.info.points, "point", what="a point of this sweep"))

    def __repr__(self) -> str:
        shape = f"{len(self.info.layers)} x {len(self.info.pairs[0].columns)}"
        return (
            f"PatchingResult({self.info.direction}, {', '.join(self.info.points)}, {shape} cells, "
            f"{len(self.info.pairs)} pairs, metric {self.info.metric}, {len(self.errors)} failed)"
        )


def _mean(values: Array) -> npt.NDArray[np.float32]:
    """Return the mean over the pairs."""
    mean: npt.NDArray[np.float32] = values.mean(axis=0).astype(np.float32)
    return mean
