# SPDX-License-Identifier: Apache-2.0
"""The bound on how much an edit may add to a row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_NORM
from vllm_steer.points import POINT_NAMES
from vllm_steer.program.compiled_edit import CompiledEdit
from vllm_steer.program.instructions import KIND_OF, UNBOUNDED
from vllm_steer.program.program import Program

StreamsAt = Callable[[str, Collection[int]], list[float]]
"""Returns the known lengths of the stream at a hook point of some layers, or of all layers if there are none."""


def check_magnitude(
    program: Program,
    max_norm: float,
    first_edit: int = 0,
    *,
    strengths: Mapping[str, float] | None = None,
    streams_at: StreamsAt | None = None,
) -> None:
    """Check how much the edits of a program may add to a row.

    `add` adds strength x norm of its vector, and `replace` strength x norm of the row that it puts there, or of its
    component in the subspace. `feature` adds to an activation, or moves it to a value, times the norm of the decoder's
    direction. `clamp` moves a projection to one of its bounds, and beyond it if the strength is above 1. The other
    kinds scale with the row itself and are not checked.

    Args:
        program: the program.
        max_norm: the largest norm that an edit may add; 0 for no limit.
        first_edit: index of the first edit to check.
        strengths: new live strengths of a running request by name; only the edits that they scale are checked.
        streams_at: lengths of the stream, by which the error tells doses.

    Raises:
        SteeringError: an edit may add more than ``max_norm``.
    """
    if not max_norm:
        return
    norms: dict[int, float] = {}
    for index, edit in enumerate(program.edits[first_edit:], start=first_edit):
        factor = 1.0 if strengths is None else strengths.get(edit.live)
        norm = 0.0 if factor is None else added_norm(edit, program, norms, factor)
        if norm > max_norm:
            source, exceeds = program.edit_source(index), _exceeds(edit, norm, max_norm, streams_at)
            if strengths is None:
                raise SteeringError(source, f"{KIND_OF[edit.code]} at {POINT_NAMES[edit.point]} {exceeds}")
            raise SteeringError(edit.live, f"with {factor:g}, {source} {exceeds}")


def _exceeds(edit: CompiledEdit, norm: float, max_norm: float, streams_at: StreamsAt | None) -> str:
    """Return the problem of a norm, with doses if the length of the stream is known."""
    streams = [] if streams_at is None else streams_at(POINT_NAMES[edit.point], edit.layers)

    def dose(value: float) -> str:
        doses = dict.fromkeys(f"{value / length:.3g}" for length in (max(streams), min(streams))) if streams else ()
        return f", a dose of {' to '.join(doses)}" if doses else ""

    return (
        f"may add a norm of {norm:.6g}{dose(norm)}; this server allows {max_norm:g}{dose(max_norm)} ({MAX_NORM.flag})"
    )


def added_norm(edit: CompiledEdit, program: Program, norms: dict[int, float], factor: float) -> float:
    """Return the largest norm that an edit may add if its strength is multiplied by ``factor``."""
    kind, strength = KIND_OF[edit.code], abs(edit.strength * factor)
    if not edit.strength:
        # It has no instructions, whatever the factor.
        return 0.0
    if kind == "feature":
        norm = float(np.linalg.norm(program.vector(edit.vectors[-1]).astype(np.float64)))
        return strength * norm * (abs(edit.low) if edit.feature and edit.feature.sets else 1.0)
    if kind == "add" or (kind == "replace" and not edit.coordinates):
        for vector in edit.vectors:
            if vector not in norms:
                norms[vector] = float(np.linalg.norm(program.vector(vector).astype(np.float64)))
        return strength * max(norms[vector] for vector in edit.vectors)
    if kind == "replace":
        return strength * float(np.linalg.norm(edit.coordinate_array().astype(np.float64), axis=0).max())
    if kind == "clamp":
        # UNBOUNDED means "no bound" on its own side only: as the other bound it is a value like any other.
        low = edit.low if edit.low > -UNBOUNDED else 0.0
        high = edit.high if edit.high < UNBOUNDED else 0.0
        return max(strength, 1.0) * max(abs(low), abs(high))
    return 0.0
