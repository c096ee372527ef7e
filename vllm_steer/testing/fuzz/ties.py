# SPDX-License-Identifier: Apache-2.0
"""Positions at which a gate or a stop of the reference is a tie.

A score within a tolerance of its bound may be beyond it in one correct engine and not in another. What follows such a
position is not compared. Soft gates and averages, whose factors are continuous, have no ties.
"""

from __future__ import annotations

from vllm_steer.request.selector import OPEN_END
from vllm_steer.testing.fuzz.answers import READOUT, Sample
from vllm_steer.testing.fuzz.workload import Form, Request

_COSINE = 0.1
"""Typical size of a cosine."""


def bounds_of(condition: Form) -> list[float]:
    """Return the bound of a condition or of its release, in a list."""
    return [condition[name] for name in ("above", "below") if name in condition]


def first_undecided(request: Request, right: Sample, tolerance: float) -> int:
    """Return the first position with a score that is too close to a bound, :data:`OPEN_END` if there is none.

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
        for bound in (*bounds_of(condition), *bounds_of(condition.get("release", {}))):
            size = _COSINE if cosine else max(1.0, abs(bound))
            close = ((values[:, 0] - bound).abs() <= tolerance * size).nonzero().flatten()
            if len(close):
                first = min(first, positions[int(close[0])])
    return first
