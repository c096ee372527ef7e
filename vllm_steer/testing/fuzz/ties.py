# SPDX-License-Identifier: Apache-2.0
"""Positions at which a gate or a stop of the reference is a tie.

A score within a tolerance of its bound may be beyond it in one correct engine and not in another. What follows such a
position is not compared. Soft gates and averages, whose factors are continuous, have no ties.
"""

from __future__ import annotations

from vllm_steer.request.selector import OPEN_END
from vllm_steer.testing.fuzz.answers import READOUT, Sample
from vllm_steer.testing.fuzz.workload import Request

_COSINE = 0.1
"""Typical size of a cosine."""


def first_undecided(request: Request, right: Sample, tolerance: float) -> int:
    """Return the first position with a score that is too close to a bound, :data:`OPEN_END` if there is none.

    Args:
        request: The request.
        right: A sample of the reference, with the scores of all positions.
        tolerance: Relative difference of scores.
    """
    forms = {each.name: each.form for each in request.readouts}
    first = OPEN_END
    for condition in request.conditions:
        if condition.sharpness is not None:
            continue
        positions, values = right.rows[condition.readout, READOUT]
        bounds = [condition.bound] if condition.release is None else [condition.bound, condition.release]
        for bound in bounds:
            size = _COSINE if forms[condition.readout] == "cosine" else max(1.0, abs(bound))
            close = ((values[:, 0] - bound).abs() <= tolerance * size).nonzero().flatten()
            if len(close):
                first = min(first, positions[int(close[0])])
    return first
