# SPDX-License-Identifier: Apache-2.0
"""Preparation of a sweep: alignment, columns, captured rows and the unpatched runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_STUDY_PAIRS, MAX_STUDY_POSITIONS
from vllm_steer.patching.axes import Alignment, Span, align, read_alignment, read_positions, windows
from vllm_steer.patching.header import PairInfo, SweepInfo
from vllm_steer.patching.metrics import Array
from vllm_steer.patching.prompts import Pair, read_tokens
from vllm_steer.patching.result import PatchingResult
from vllm_steer.patching.runner import Runner, SiteRows
from vllm_steer.patching.settings import Corruption, Settings
from vllm_steer.patching.sources import PromptSource, Source, means, noised, resampled, zeros
from vllm_steer.patching.sweep import Case, Sweep, measure
from vllm_steer.request import Edit
from vllm_steer.request.scalars import is_integer, shown

EMBEDDINGS = ("pre_attn", 0)
"""Site at which the stream is the embeddings."""

_ALIGNMENT_FORM = (
    "give alignment as pairs such as [(0, 0), (3, 6)]: rows of positions 0 and 3 of the other prompt for positions 0 "
    "and 6 of the patched one"
)


def _subject_forms(count: int) -> str:
    each = f", one text for each of the {count} pairs" if count > 1 else ""
    return f"give one text{each}, or [start, stop]"


class Preparation:
    """Runs everything that the cells of a sweep need."""

    def __init__(
        self, runner: Runner, pairs: Sequence[Pair], corruption: Corruption, alignment: object, settings: Settings
    ) -> None:
        self._runner, self._pairs, self._settings = runner, pairs, settings
        self._corruption, self._alignment = corruption, alignment
        self._ablated = settings.direction == "ablation"
        self._num_positions = 0

    def run(self) -> tuple[Sweep, PatchingResult]:
        """Return the sweep, and its result without cells.

        Raises:
            SteeringError: An argument does not fit the prompts, or ``recovered`` would divide by zero.
            RuntimeError: An unpatched run failed.
        """
        settings = self._settings
        infos = [self._pair_info(i, pair) for i, pair in enumerate(self._pairs)]
        self._check_columns(infos)
        self._runner.reserve(*self._size([info for info, _, _ in infos]))
        sources = self._ablation_sources() if self._ablated else None
        deviation = self._embedding_deviation()
        cases = [
            case
            for number, pair in enumerate(self._pairs)
            for case in self._cases(number, pair, infos[number][1:], deviation, sources)
        ]
        subspace = hashlib.blake2b(digest_size=8)
        for given in (settings.subspaces, settings.random):
            for site, directions in sorted((given or {}).items()):
                subspace.update(repr(site).encode() + directions.tobytes())
        where = [list(alignment.source_of.items()) for _, _, alignment in infos]
        reference = self._reference() if self._corruption.ablate in ("mean", "resample") else []
        subjects = [] if self._corruption.noise is None else list(map(self._subject, range(len(self._pairs))))
        info = SweepInfo(
            model=self._runner.facts.model,
            direction=settings.direction,
            corruption=self._corruption.description,
            metric=settings.metric,
            points=settings.points,
            layers=settings.layers,
            row_layers=settings.row_layers,
            pairs=tuple(each[0] for each in infos),
            draws=self._corruption.draws,
            strength=settings.strength,
            kl_tokens=settings.kl_tokens,
            subspace="" if settings.subspaces is None else subspace.hexdigest(),
            random_control=settings.random is not None,
            sources=hashlib.blake2b(repr((where, reference, subjects)).encode(), digest_size=8).hexdigest(),
        )
        sweep = Sweep(settings, tuple(case for case, _ in cases))
        clean, corrupt = self._unpatched(cases)
        result = PatchingResult.empty(info, clean, corrupt)
        if settings.metric == "recovered":
            result.values("recovered")  # raises if clean and corrupt are too close
        return sweep, result

    def _pair_info(self, number: int, pair: Pair) -> tuple[PairInfo, tuple[tuple[int, ...], ...], Alignment]:
        settings = self._settings
        denoising = settings.direction == "denoising"
        corrupt = pair.corrupt or pair.clean
        base, source = (corrupt, pair.clean) if denoising else (pair.clean, corrupt)
        if self._alignment is None:
            alignment = align(source, base)
        else:
            alignment = read_alignment(self._alignment, len(source), len(base), "alignment")
        pieces = self._runner.pieces(base)
        given = read_positions(settings.positions, pieces)
        if given is None:
            singles = tuple((position, position + 1) for position in alignment.source_of)
            if not singles:
                raise SteeringError("positions", f"pair {number} has no aligned positions; {_ALIGNMENT_FORM}")
        else:
            singles = given
        spans = windows(singles, settings.position_window, len(base))
        self._count_positions(spans)
        if given is not None:
            for i, span in enumerate(given):
                lost = [position for position in range(*span) if position not in alignment.source_of]
                if lost and not settings.skip_unaligned:
                    raise SteeringError(
                        f"positions[{i}]",
                        f"position {lost[0]} of pair {number} ({shown(pieces[lost[0]])}) has no aligned position in "
                        f"the other prompt. Remove it from positions, or add a pair (there, {lost[0]}) to alignment",
                    )
        columns = tuple(tuple(p for p in range(*span) if p in alignment.source_of) for span in spans)
        labels = tuple("".join(pieces[start:stop]) for start, stop in singles)
        info = PairInfo(
            base=base,
            source=() if self._ablated else source,
            answer=pair.targets.answer,
            foil=pair.targets.foil,
            columns=spans,
            labels=labels,
            skipped=alignment.skipped,
        )
        return info, columns, alignment

    def _count_positions(self, spans: Sequence[Span]) -> None:
        """Raise SteeringError for columns that would fill the memory: a short body can name many long spans."""
        self._num_positions += sum(stop - start for start, stop in spans)
        if self._num_positions > MAX_STUDY_POSITIONS:
            raise SteeringError(
                "positions",
                f"the columns have more than {MAX_STUDY_POSITIONS} positions in all; use fewer or shorter spans, fewer "
                "pairs or a smaller position_window",
            )

    @staticmethod
    def _check_columns(infos: Sequence[tuple[PairInfo, Any, Any]]) -> None:
        widths = [len(info.columns) for info, _, _ in infos]
        if len(set(widths)) > 1:
            i = next(i for i, width in enumerate(widths) if width != widths[0])
            raise SteeringError(
                "positions",
                f"pair 0 has {widths[0]} aligned positions and pair {i} has {widths[i]}; name positions that all pairs "
                "have, for example [-3, -2, -1], or texts as {'span': ...}",
            )

    def _size(self, infos: Sequence[PairInfo]) -> tuple[int, int]:
        """Return the number of forward passes of all cells, and the size of the captured rows in bytes."""
        settings, draws = self._settings, self._corruption.draws
        cells = len(settings.points) * len(settings.layers) * len(infos[0].columns) * draws
        cells *= 1 if settings.random is None else 2
        runs = sum(cells * len(pair.targets.passes) for pair in self._pairs)
        sites = sum(map(len, settings.sites.values()))
        captured = draws if settings.direction == "noising" else 1
        own = draws if settings.random is not None else int(settings.control)
        tokens = sum(captured * len(info.source) + own * len(info.base) for info in infos)
        if self._ablated and self._corruption.ablate != "zero":
            tokens += sum(map(len, self._reference()))
        return runs, 4 * tokens * sites * self._runner.facts.hidden_size

    def _embedding_deviation(self) -> float:
        """Return the standard deviation of the embeddings' components over the tokens of all clean prompts."""
        if self._corruption.noise is None:
            return 0.0
        rows = [self._runner.capture(pair.clean, {EMBEDDINGS[0]: [EMBEDDINGS[1]]})[EMBEDDINGS] for pair in self._pairs]
        return float(np.concatenate(rows).std(dtype=np.float64))

    def _cases(
        self,
        number: int,
        pair: Pair,
        places: tuple[tuple[tuple[int, ...], ...], Alignment],
        deviation: float,
        sources: Sequence[Sequence[Source]] | None,
    ) -> list[tuple[Case, Case | None]]:
        columns, alignment = places
        settings, corruption = self._settings, self._corruption
        denoising = settings.direction == "denoising"
        base = pair.corrupt if denoising and pair.corrupt else pair.clean
        clean_next = self._runner.top(pair.clean, settings.kl_tokens) if settings.kl_tokens else None
        clean_rows: SiteRows = {}
        if denoising or corruption.noise is not None:
            clean_rows = self._runner.capture(pair.clean, self._with_embeddings())
        cases = []
        for draw in range(corruption.draws):
            noise: tuple[Edit, ...] = ()
            if corruption.noise is not None:
                seed, sigma = (corruption.seed, number, draw), corruption.noise * deviation
                noise = (noised(clean_rows[EMBEDDINGS], self._subject(number), sigma, seed),)
            edits = noise if denoising else ()
            if sources is not None:
                source = sources[number][draw]
            elif denoising:
                source = PromptSource(clean_rows, alignment.source_of)
            else:
                corrupt = self._runner.capture(pair.corrupt or pair.clean, settings.sites, noise)
                source = PromptSource(corrupt, alignment.source_of)
            own = None
            if settings.control and (draw == 0 or settings.random is not None):
                own = PromptSource(self._runner.capture(base, settings.sites, edits), {p: p for p in range(len(base))})
            case = Case(base, edits, source, pair.targets, columns, own, clean_next)
            # The run with which the patched runs are compared; a case that is only measured.
            other = case if denoising else replace(case, tokens=pair.corrupt or pair.clean, edits=noise)
            cases.append((case, None if self._ablated else other))
        return cases

    def _subject(self, number: int) -> list[int]:
        """Return the positions of a pair's clean prompt that get noise."""
        subject, count = self._corruption.subject, len(self._pairs)
        if isinstance(subject, (list, tuple)) and any(isinstance(each, str) for each in subject):
            if len(subject) != count or not all(isinstance(each, str) for each in subject):
                raise SteeringError("subject", f"{_subject_forms(count)}, not {shown(subject)}")
            subject = subject[number]
        span = {"span": subject} if isinstance(subject, str) else subject
        if not isinstance(span, (dict, list, tuple)) and not is_integer(span):
            raise SteeringError("subject", f"{_subject_forms(count)}, not {shown(subject)}")
        spans = read_positions([span], self._runner.pieces(self._pairs[number].clean), "subject")
        return [position for each in spans or () for position in range(*each)]

    def _with_embeddings(self) -> dict[str, list[int]]:
        sites = dict(self._settings.sites)
        if self._corruption.noise is not None:
            sites[EMBEDDINGS[0]] = sorted({*sites.get(EMBEDDINGS[0], ()), EMBEDDINGS[1]})
        return sites

    def _ablation_sources(self) -> list[list[Source]]:
        """Return the source of each pair and draw."""
        corruption, sites = self._corruption, self._settings.sites
        if corruption.ablate == "zero":
            flat = [(point, layer) for point, layers in sites.items() for layer in layers]
            return [[zeros(flat, self._runner.facts.hidden_size)]] * len(self._pairs)
        reference = self._reference()
        captured = [self._runner.capture(tokens, sites) for tokens in reference]
        if corruption.ablate == "mean":
            return [[means(captured)]] * len(self._pairs)
        random = np.random.default_rng(corruption.seed)
        result: list[list[Source]] = []
        for number, pair in enumerate(self._pairs):
            others = [i for i, tokens in enumerate(reference) if tokens != pair.clean]
            if not others:
                raise SteeringError("reference", f"has no prompt other than that of pair {number}; add some")
            drawn = random.choice(others, corruption.draws)
            result.append([resampled(captured[i], len(pair.clean)) for i in drawn.tolist()])
        return result

    def _reference(self) -> list[tuple[int, ...]]:
        given = self._corruption.reference
        if given is None:
            return [pair.clean for pair in self._pairs]
        if not isinstance(given, (list, tuple)) or not given:
            raise SteeringError("reference", f"must be a list of prompts, not {shown(given)}")
        if len(given) > MAX_STUDY_PAIRS:
            raise SteeringError("reference", f"has {len(given)} prompts; a study has at most {MAX_STUDY_PAIRS}")
        return [read_tokens(prompt, self._runner, f"reference[{i}]", special=True) for i, prompt in enumerate(given)]

    def _unpatched(self, cases: Sequence[tuple[Case, Case | None]]) -> tuple[Array, Array]:
        """Return the measures of the clean and of the corrupt run of each case."""
        draws = self._corruption.draws
        clean_cases = [replace(cases[i * draws][0], tokens=pair.clean, edits=()) for i, pair in enumerate(self._pairs)]
        clean = np.repeat(self._measure(clean_cases, "clean"), draws, axis=0)
        corrupt = [other for _, other in cases if other is not None]
        return clean, self._measure(corrupt, "corrupt") if corrupt else np.full_like(clean, np.nan)

    def _measure(self, cases: Sequence[Case], what: str) -> Array:
        measured = measure(self._runner, [(case, ()) for case in cases], self._settings.custom)
        for i, each in enumerate(measured):
            if each.error is not None:
                raise RuntimeError(
                    f"the {what} run of pair {i // max(1, len(cases) // len(self._pairs))}: {each.error}"
                )
        return np.array([each.measures for each in measured])
