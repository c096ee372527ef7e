# SPDX-License-Identifier: Apache-2.0
"""Compare a request's answer with the answer that the same request gets alone.

Tokens must agree up to the first tie, a token for which the reference's two best candidates are equally likely within
a tolerance. After a tie the sample is a different text, so only what precedes it is compared. The reference's
log-probabilities decide what a tie is.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_steer.engine.capabilities import EXCEEDS
from vllm_steer.request.selector import OPEN_END
from vllm_steer.testing.fuzz.answers import READOUT, Answer, Sample
from vllm_steer.testing.fuzz.drive import Run
from vllm_steer.testing.fuzz.workload import LOWEST_TEMPERATURE, Form, Request

_NO_CHECK = "the self-check, which proves the final norm, was skipped"
"""Part of the refusal of a lens in an engine whose steps are too small for the self-check."""
_COSINE = 0.1
"""Typical size of a cosine."""


@dataclass(frozen=True)
class Tolerance:
    """Differences that floating-point rounding may cause.

    Attributes:
        row: Distance of a captured row from the reference row, relative to the norm of the reference row.
        outlier: Distance that one row in 20 may have, and one row of a shorter capture.
        logprob: Absolute difference of a log-probability.
        tie: Difference in log-probability up to which another token counts as a tie with the likeliest one.
    """

    row: float
    outlier: float
    logprob: float
    tie: float

    @classmethod
    def of(cls, dtype: str) -> Tolerance:
        """Return the tolerance for models of ``dtype``."""
        # In bfloat16, attention between nearly equal scores turns the rounding of some rows into large distances: the
        # default model's rows are 0.024 from those in float32 in the median, 1 % are 0.11 away and 0.1 % are 0.2 away.
        return cls(2e-3, 2e-3, 1e-2, 1e-2) if dtype == "float32" else cls(0.08, 0.2, 0.5, 0.5)


@dataclass
class Counts:
    """Number of compared items, over all runs."""

    rounds: int = 0
    engines: int = 0
    requests: int = 0
    plain_requests: int = 0
    by_module: int = 0
    globally: int = 0
    gated: int = 0
    stopped: int = 0
    live: int = 0
    undecided: int = 0
    streamed: int = 0
    tokens: int = 0
    rows: int = 0
    ties: int = 0
    refused: int = 0
    aborted: int = 0
    preempted: int = 0
    cached_tokens: int = 0
    steps: int = 0


def compare_runs(requests: list[Request], got: Run, right: Run, tolerance: Tolerance, counts: Counts) -> dict[str, str]:
    """Return the problems by request name; the empty name is the engine itself."""
    counts.engines += 1
    counts.preempted += got.preempted
    counts.steps += got.steps
    wrong: dict[str, str] = {}
    if got.broken:
        wrong[""] = got.broken
    for request in requests:
        answer, reference = got.answers.get(request.name), right.answers[request.name]
        if answer is None:
            if not got.broken:
                wrong[request.name] = "never finished"
            continue
        counts.aborted += answer.aborted
        counts.refused += answer.refused is not None
        counts.cached_tokens += answer.cached_tokens
        problem = None if answer.aborted else compare(request, answer, reference, tolerance, counts)
        if problem:
            wrong[request.name] = problem
    return wrong


def compare(request: Request, got: Answer, right: Answer, tolerance: Tolerance, counts: Counts) -> str | None:
    """Return a description of the first difference, or None."""
    if got.refused is not None:
        if right.refused is not None or any(text in got.refused for text in (EXCEEDS, "max_segments", _NO_CHECK)):
            return None
        return f"refused: {got.refused}"
    counts.requests += 1
    counts.plain_requests += request.plain
    counts.by_module += request.module
    counts.globally += bool(request.globally)
    counts.streamed += request.stream
    counts.gated += any("when" in edit for edit in request.edits)
    counts.live += bool(request.strengths)
    counts.stopped += any(sample.stop is not None for sample in got.samples)
    if len(got.samples) != len(right.samples):
        return f"{len(got.samples)} samples, expected {len(right.samples)}"
    for number, (sample, reference) in enumerate(zip(got.samples, right.samples, strict=True)):
        problem = _compare_sample(request, sample, reference, tolerance, counts)
        if problem:
            return f"sample {number}: {problem}" if request.n > 1 else problem
    return None


def _compare_sample(request: Request, got: Sample, right: Sample, tolerance: Tolerance, counts: Counts) -> str | None:
    # Sampling at this temperature picks a token that is less likely by d with odds of exp(-d / LOWEST_TEMPERATURE).
    tie = tolerance.tie if request.n == 1 else tolerance.tie + 25 * LOWEST_TEMPERATURE
    undecided = _first_undecided(request, right, 2.5 * tolerance.row)
    # The token behind that position is the last one that does not depend on it.
    certain = max(undecided + 1 - len(request.prompt), 0)
    counts.undecided += certain <= len(right.tokens)
    agreed = min(len(right.tokens), certain)
    for i, (token, expected) in enumerate(zip(got.tokens, right.tokens, strict=False)):
        if i >= agreed:
            break
        top = right.top[i]
        if token != expected:
            # NaN compares as false, here and below, so it counts as different.
            if not top.get(token, float("-inf")) >= max(top.values()) - tie:
                behind = f"{max(top.values()) - top[token]:.3g} behind" if token in top else "not among the likeliest"
                return f"token {i} is {token}, expected {expected}: {behind} in the reference"
            counts.ties += 1
            agreed = i
            break
        if token in got.top[i] and not abs(got.top[i][token] - top[token]) <= tolerance.logprob:
            return f"token {i} has log-probability {got.top[i][token]:.5f}, expected {top[token]:.5f}"
    if len(got.tokens) < agreed:
        return f"{len(got.tokens)} tokens ({got.finish_reason}), expected {agreed} or more"
    if agreed == len(right.tokens) < certain:
        ends = [
            f"{len(each.tokens)} tokens ({each.finish_reason}{(each.stop and f', {each.stop}') or ''})"
            for each in (got, right)
        ]
        if ends[0] != ends[1]:
            return f"{ends[0]}, expected {ends[1]}"
        undecided = OPEN_END
    counts.tokens += agreed
    stop = min(len(request.prompt) + agreed, undecided)
    return _compare_rows(
        request, got, right, stop, agreed < len(right.tokens) or undecided < OPEN_END, tolerance, counts
    )


def _compare_rows(
    request: Request, got: Sample, right: Sample, stop: int, cut: bool, tolerance: Tolerance, counts: Counts
) -> str | None:
    """Compare the rows; if ``cut``, only those before position ``stop``, where the texts start to differ."""
    if got.status != right.status:
        return f"capture is {got.status} ({got.error}), expected {right.status}"
    captured, expected_sites = ([site for site in each.rows if site[1] != READOUT] for each in (got, right))
    if captured != expected_sites or got.rows.keys() != right.rows.keys():
        return f"capture has sites {list(got.rows)}, expected {list(right.rows)}"
    form = None if request.capture is None else request.capture.get("reduce")
    reduced = form in ("mean", "last")
    for (point, layer), (positions, rows) in got.rows.items():
        expected_positions, expected = right.rows[point, layer]
        readout = layer == READOUT
        if cut and reduced and not readout:
            continue
        if cut:
            kept = sum(position < stop for position in expected_positions)
            positions, rows = positions[:kept], rows[:kept]
            expected_positions, expected = expected_positions[:kept], expected[:kept]
        if positions != expected_positions:
            return f"{point}[{layer}] has rows of positions {list(positions)}, expected {list(expected_positions)}"
        if rows.shape != expected.shape:
            return f"{point}[{layer}] has shape {list(rows.shape)}, expected {list(expected.shape)}"
        counts.rows += len(rows)
        if not len(rows):
            continue
        scale = expected.norm(dim=1).clamp(min=1.0)
        # NaN compares as false, so it counts as different.
        distance = (rows - expected).norm(dim=1) / scale
        # The error of a projection scales with the norm of the row, which is larger than the projection.
        limit = tolerance.row * (20 if readout or isinstance(form, dict) else 1)
        if (form is None or readout) and int((~(distance <= limit)).sum()) <= max(len(rows) // 20, 1):
            limit *= tolerance.outlier / tolerance.row
        bad = (~(distance <= limit)).nonzero().flatten().tolist()
        if bad:
            where = "reduced" if reduced and not readout else f"position {positions[bad[0]]}"
            difference = f"the row differs by {float(distance[bad[0]]):.3g} of its norm ({len(bad)} such rows)"
            return f"{point}[{layer}] at {where}: {difference}"
    return None


def _bounds_of(condition: Form) -> list[float]:
    """Return the bound of a condition or of its release, in a list."""
    return [condition[name] for name in ("above", "below") if name in condition]


def _first_undecided(request: Request, right: Sample, tolerance: float) -> int:
    """Return the first position with a score that is too close to a bound, :data:`OPEN_END` if there is none.

    Such a score may be beyond its bound in one correct engine and not in another. What follows the position is not
    compared. Soft gates and averages, whose factors are continuous, have no ties.

    Args:
        request: The request.
        right: A sample of the reference, with the scores of all positions.
        tolerance: Relative difference of scores.
    """
    first = OPEN_END
    for condition in request.conditions:
        if "sharpness" in condition:
            continue
        positions, values = right.rows[condition["readout"], READOUT]
        cosine = request.readouts[condition["readout"]].get("cosine")
        for bound in (*_bounds_of(condition), *_bounds_of(condition.get("release", {}))):
            size = _COSINE if cosine else max(1.0, abs(bound))
            close = ((values[:, 0] - bound).abs() <= tolerance * size).nonzero().flatten()
            if len(close):
                first = min(first, positions[int(close[0])])
    return first
