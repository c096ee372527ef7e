# SPDX-License-Identifier: Apache-2.0
"""Studies: prompts, and sweeps of patches over them."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.patching.axes import read_window, tile
from vllm_steer.patching.file import check_place, resume
from vllm_steer.patching.metrics import CustomMetric
from vllm_steer.patching.prepare import Preparation
from vllm_steer.patching.progress import Progress
from vllm_steer.patching.prompts import Pair, read_pair, read_pairs
from vllm_steer.patching.result import PatchingResult
from vllm_steer.patching.runner import Runner
from vllm_steer.patching.settings import read_corruption, read_settings
from vllm_steer.patching.sweep import Batch, Cell, run_batches
from vllm_steer.request.scalars import read_number

SAVE_SECONDS = 10.0
"""Least time between two writes of a sweep's file."""


class PatchingStudy:
    """Activation patching between two runs: a clean one, and one whose answer has changed.

    Args:
        llm: An `LLM` with steering, or a `Client` or
            `AsyncClient` of a server. Over a server, ``kl`` distinguishes at most 20 tokens, and
            ``cache_hit_rate`` needs ``--enable-prompt-tokens-details``. The study and its sweeps wait for their
            requests; in asynchronous code, run them with ``asyncio.to_thread``, or await `AsyncClient.patch`.
        clean: The clean prompt, as text or token ids.
        corrupt: The corrupt prompt. Instead, ``noise`` or ``ablate`` can be given.
        answer: The answer of the clean prompt, as text or as one or more token ids. An answer of several tokens is
            scored as a sequence.
        foil: The answer of the corrupt prompt, for ``logit_diff``.
        pairs: Several ``(clean, corrupt, answer, foil)`` instead of one; ``(clean, answer, foil)`` without corrupt
            prompts.
        noise: Corrupt the clean prompt by Gaussian noise on the embeddings of ``subject``, of this many standard
            deviations of the embeddings. The noise is added to the stream at ``pre_attn`` of layer 0, which includes
            learned position embeddings and the embedding's scale, if the model has them.
        subject: Text in the clean prompt, or its ``[start, stop]`` positions; with several pairs, one text for all of
            them or one for each.
        ablate: ``"zero"``, ``"mean"`` (over the tokens of ``reference``) or ``"resample"`` (rows of another prompt of
            ``reference`` at the same position): cells replace rows of the clean run, without a corrupt run.
        reference: Prompts for ``ablate``; the clean prompts by default.
        draws: Draws of the noise or of resampled prompts, over which grids are averaged. Default 10 for noise, 1 for
            resampling.
        alignment: Pairs of positions (in the prompt that rows come from, in the patched prompt). With
            ``direction="noising"`` the two prompts change places, so the order of each pair does too. All ``pairs`` use
            the same alignment. By default, prompts of equal length are aligned position by position; of others, the
            equal beginning and the equal end are aligned and other positions are skipped.
        seed: Seed of the draws, and of the random subspaces of the control.

    Raises:
        SteeringError: An argument is invalid.

    Examples:
        >>> from vllm_steer.patching import PatchingStudy  # doctest: +SKIP
        >>> study = PatchingStudy(  # doctest: +SKIP
        ...     llm,
        ...     clean="The Eiffel Tower is in the city of",
        ...     corrupt="The Colosseum is in the city of",
        ...     answer=" Paris",
        ...     foil=" Rome",
        ... )
        >>> result = study.sweep(points=["post_block"], metric="recovered")  # doctest: +SKIP
        >>> result.plot("patching.png")  # doctest: +SKIP
    """

    def __init__(
        self,
        llm: Any,
        *,
        clean: str | Sequence[int] | None = None,
        corrupt: str | Sequence[int] | None = None,
        answer: str | int | Sequence[int] | None = None,
        foil: str | int | Sequence[int] | None = None,
        pairs: Sequence[Sequence[Any]] | None = None,
        noise: float | None = None,
        subject: Any = None,
        ablate: str | None = None,
        reference: Sequence[str | Sequence[int]] | None = None,
        draws: int | None = None,
        alignment: Sequence[tuple[int, int]] | None = None,
        seed: int = 0,
    ) -> None:
        self._runner = _runner(llm)
        one = {"clean": clean, "corrupt": corrupt, "answer": answer, "foil": foil}
        given = [name for name, value in one.items() if value is not None]
        if pairs is not None and given:
            raise SteeringError("pairs", f"cannot be combined with {given[0]}; put all prompts into pairs")
        if pairs is None:
            for name in ("clean", "answer"):
                if one[name] is None:
                    raise SteeringError(name, "is missing")
        other = noise is not None or ablate is not None
        with_corrupt = corrupt is not None if pairs is None else not other
        self._corruption = read_corruption(
            has_corrupt=with_corrupt, noise=noise, subject=subject, draws=draws, ablate=ablate, reference=reference,
            seed=seed,
        )  # fmt: skip
        if alignment is not None and not with_corrupt:
            raise SteeringError("alignment", "has no effect without a corrupt prompt; leave it out")
        if pairs is None:
            self._pairs: tuple[Pair, ...] = (read_pair(self._runner, clean, corrupt, answer, foil),)
        else:
            self._pairs = read_pairs(pairs, self._runner, with_corrupt=with_corrupt)
        self._alignment = alignment

    def sweep(
        self,
        points: Sequence[str] | str = ("post_block",),
        layers: Any = "all",
        positions: Any = "all",
        *,
        metric: str | CustomMetric = "logit_diff",
        direction: str | None = None,
        strength: float = 1.0,
        layer_window: int = 1,
        position_window: int = 1,
        subspace: Any = None,
        kl_tokens: int | None = None,
        control: bool = True,
        file: str | Path | None = None,
        progress: bool = True,
    ) -> PatchingResult:
        """Run one cell for each point, layer and position, and return the grids.

        Args:
            points: Hook points; one grid each.
            layers: ``"all"``, or a list of layers and ``[start, stop]`` pairs; one row of the grid each.
            positions: ``"all"``, or a list of positions in the patched run (negative ones count from the end),
                ``[start, stop]`` pairs and texts as ``{"span": text, "occurrence": 0}``; one column each.
            metric: Default metric of the grids: ``"logit_diff"``, ``"logprob"``, ``"recovered"``, ``"kl"``, or a
                function of `LogProbs` that returns a number. ``logprob``,
                ``logit_diff`` and ``recovered`` come from the same runs; ``kl`` needs ``kl_tokens`` or ``metric="kl"``
                in the sweep, and a function must be the sweep's metric.
            direction: ``"denoising"`` (default) patches clean rows into the corrupt run: are they sufficient?
                ``"noising"`` patches corrupt rows into the clean run: are they necessary?
            strength: 1 to replace rows, less to interpolate.
            layer_window: Patch this many layers around each layer together.
            position_window: Patch this many positions around each position together.
            subspace: Directions ``[k, hidden]``, or ``{point: {layer: directions}}``, if only the component in their
                span is patched. With ``control``, each cell is run a second time with a change of the same norm in a
                random subspace of as many dimensions; see `PatchingResult.grid`.
            kl_tokens: Most probable tokens of the clean run that the divergence distinguishes; all others count as one
                event, so that ``kl`` is a lower bound unless they are the whole vocabulary. Default: as many as the
                engine allows if the metric is ``"kl"``, otherwise the divergence is not measured.
            control: Also run each site with the unpatched run's own rows, and subspaces beside random ones.
            file: Safetensors file to which the results are written as they come. If it exists, its sweep continues;
                cells that failed are run again.
            progress: Whether to show a progress bar.

        Raises:
            SteeringError: An argument is invalid, ``recovered`` would divide by zero, or ``file`` has another sweep.
            RuntimeError: An unpatched run failed. A cell that fails is NaN instead; see `PatchingResult.errors`.
        """
        arguments = {name: value for name, value in locals().items() if name in SWEEP_DEFAULTS}
        return self._run(arguments, file, progress)

    def stream(self, **arguments: Any) -> Iterator[tuple[PatchingResult, Batch | None]]:
        """Run a sweep and yield its result after each batch of cells.

        The arguments are those of `sweep`; ``file`` and ``progress`` are not accepted.
        The first result has the unpatched runs only, and no batch. The result is one object, which is updated.
        """
        yield from self._stream(_sweep_arguments(arguments), None)

    def coarse_to_fine(
        self,
        points: Sequence[str] | str = ("post_block",),
        *,
        layer_span: int = 4,
        position_span: int = 4,
        keep: float = 0.25,
        file: str | Path | None = None,
        progress: bool = True,
        **arguments: Any,
    ) -> PatchingResult:
        """Patch blocks of layers and positions first, then the single cells inside the blocks with an effect.

        Args:
            points: Hook points.
            layer_span: Layers of a block.
            position_span: Positions of a block, counted among the columns.
            keep: Share of a point's largest effect that a block must have for its cells to be run.
            file: As for `sweep`; for the single cells.
            progress: Whether to show progress bars.
            **arguments: Further arguments of `sweep`, other than layers, positions and windows.

        Returns:
            The grids of single cells. Cells of other blocks are NaN; `PatchingResult.not_run` has the block's effect.

        Raises:
            SteeringError: See `sweep`.
        """
        share = read_number(keep, "keep")
        width = read_window(layer_span, "layer_span"), read_window(position_span, "position_span")
        fine = _sweep_arguments(arguments, "layers", "positions", "layer_window", "position_window")
        fine["points"] = points
        path = _read_file(file)
        _, empty = self._prepare(fine)
        if path is not None and path.exists():
            resume(path, empty)  # refuses the file of another sweep before the blocks run
        columns = empty.info.pairs[0].columns
        if any(info.columns != columns for info in empty.info.pairs):
            raise SteeringError("pairs", "align differently, so blocks of positions differ; use sweep")
        blocks = tile(len(columns), width[1])
        spans = [[columns[start][0], columns[stop - 1][1]] for start, stop in blocks]
        rows = tile(self._runner.facts.num_layers, width[0])
        blocky = {**fine, "layers": [list(row) for row in rows], "positions": spans, "skip_unaligned": True}
        coarse = self._run(blocky, None, progress)
        only: set[Cell] = set()
        reasons: dict[Cell, str] = {}
        effects = np.abs(coarse.effects().mean(axis=0))
        for index, effect in np.ndenumerate(effects):
            point, row, block = index
            limit = share * np.nanmax(effects[point])
            for case, layer, column in np.ndindex(
                len(empty.clean), *(stop - start for start, stop in (rows[row], blocks[block]))
            ):
                cell = (case, point, rows[row][0] + layer, blocks[block][0] + column)
                if not effect < limit:  # also true for a block that failed
                    only.add(cell)
                else:
                    reasons[cell] = f"not run: the block around it has an effect of {effect:.3g}, below {limit:.3g}"
        return self._run(fine, path, progress, only, reasons)

    def _prepare(self, arguments: Mapping[str, Any]) -> Any:
        settings = read_settings(self._runner, self._pairs, self._corruption, arguments)
        return Preparation(self._runner, self._pairs, self._corruption, self._alignment, settings).run()

    def _run(
        self,
        arguments: Mapping[str, Any],
        file: str | Path | None,
        progress: bool,
        only: Collection[Cell] | None = None,
        reasons: Mapping[Cell, str] | None = None,
    ) -> PatchingResult:
        path = _read_file(file)
        saved, result = time.monotonic(), None
        try:
            with Progress() if progress else nullcontext() as bar:
                for result, batch in self._stream(arguments, path, only, reasons):
                    if bar is not None:
                        total = result.cells[..., 0].size if only is None else len(only)
                        bar.show(total, 0 if batch is None else len(batch.cells), result)
                    if path is not None and time.monotonic() - saved > SAVE_SECONDS:
                        result.save(path)
                        saved = time.monotonic()
        finally:
            if path is not None and result is not None:
                result.save(path)
        if result is None:
            raise RuntimeError("the sweep has not started")
        return result

    def _stream(
        self,
        arguments: Mapping[str, Any],
        path: Path | None,
        only: Collection[Cell] | None = None,
        reasons: Mapping[Cell, str] | None = None,
    ) -> Iterator[tuple[PatchingResult, Batch | None]]:
        sweep, result = self._prepare(arguments)
        if path is not None and path.exists():
            result = resume(path, result)
        done = result.finished
        # The file has values of cells that an earlier call has run.
        result.not_run.update({cell: reason for cell, reason in (reasons or {}).items() if cell not in done})
        yield result, None
        for batch in run_batches(sweep, self._runner, done, only, result.controlled):
            result.add(batch)
            yield result, batch


SWEEP_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        name: argument.default
        for name, argument in inspect.signature(PatchingStudy.sweep).parameters.items()
        if name not in ("self", "file", "progress")
    }
)
"""Arguments of a sweep that decide about its result, with their defaults."""


def _sweep_arguments(given: Mapping[str, Any], *chosen: str) -> dict[str, Any]:
    """Return all arguments of a sweep; raise SteeringError for one that is unknown or ``chosen`` by its caller."""
    for name in given:
        if name in chosen:
            raise SteeringError(name, "is chosen by coarse_to_fine; use sweep to choose it")
        if name not in SWEEP_DEFAULTS:
            offered = ", ".join(each for each in SWEEP_DEFAULTS if each not in chosen)
            raise SteeringError(name, f"unknown argument; use one of {offered}")
    return {**SWEEP_DEFAULTS, **given}


def _read_file(file: str | Path | None) -> Path | None:
    if file is None:
        return None
    path = Path(file)
    check_place(path)
    return path


def _runner(llm: Any) -> Runner:
    if hasattr(llm, "score") and hasattr(llm, "facts"):
        runner: Runner = llm
        return runner
    over_http: Callable[[], Runner] | None = getattr(llm, "_patching_runner", None)
    if over_http is not None:  # a client, which lives in a higher package
        return over_http()
    from vllm_steer.patching.offline import OfflineRunner

    return OfflineRunner(llm)
