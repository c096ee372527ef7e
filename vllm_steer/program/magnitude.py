# SPDX-License-Identifier: Apache-2.0
"""How much an edit can add to a row, where that does not depend on the row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES
from vllm_steer.program.instructions import KIND_OF, UNBOUNDED
from vllm_steer.program.program import Program, Step


def check_magnitude(program: Program, steps: Iterable[Step], ceiling: float) -> None:
    """Raise SteeringError where one of ``steps``, which are of ``program``, may add more than ``ceiling``; 0 is none.

    An `add` adds strength x norm of its vector, a `clamp` at most moves a projection to one of its bounds. The other
    kinds go by the stream itself.
    """
    if not ceiling:
        return
    norms: dict[int, float] = {}
    for step in steps:
        kind = KIND_OF[step.code]
        if kind == "add":
            if step.vector not in norms:
                norms[step.vector] = float(np.linalg.norm(program.vector(step.vector).astype(np.float64)))
            found = abs(step.strength) * norms[step.vector]
        elif kind == "clamp":
            found = max(abs(bound) for bound in (step.low, step.high, 0.0) if abs(bound) < UNBOUNDED)
        else:
            continue
        if found > ceiling:
            raise SteeringError(
                f"{kind} at {POINT_NAMES[step.point]}",
                f"may add {found:.6g}, and the ceiling of this server is {ceiling:g} (--steering-max-norm)",
            )
