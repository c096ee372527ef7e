# SPDX-License-Identifier: Apache-2.0
"""How much an edit can add to a row, where that does not depend on the row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES
from vllm_steer.program.instructions import KIND_OF, UNBOUNDED
from vllm_steer.program.program import CompiledEdit, Program


def check_magnitude(program: Program, steps: Iterable[CompiledEdit], ceiling: float) -> None:
    """Raise SteeringError where one of ``steps``, which are of ``program``, may add more than ``ceiling``; 0 is none.

    An `add` adds strength x norm of its vector; a `clamp` moves a projection to one of its bounds, and beyond it with a
    strength above 1. The other kinds go by the stream itself.
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
            # The largest number is no bound on its own side alone: on the other one it is where everything is moved to.
            low, high = (step.low if step.low > -UNBOUNDED else 0.0), (step.high if step.high < UNBOUNDED else 0.0)
            found = max(abs(step.strength), 1.0) * max(abs(low), abs(high))
        else:
            continue
        if found > ceiling:
            raise SteeringError(
                f"{kind} at {POINT_NAMES[step.point]}",
                f"may add {found:.6g}, and the ceiling of this server is {ceiling:g} (--steering-max-norm)",
            )
