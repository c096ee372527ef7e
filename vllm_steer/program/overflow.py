# SPDX-License-Identifier: Apache-2.0
"""Refusal of edits whose own numbers are too large to compute with, whatever the row that they change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES
from vllm_steer.program.compiled_edit import CompiledEdit
from vllm_steer.program.instructions import KIND_OF
from vllm_steer.program.magnitude import added_norm
from vllm_steer.program.program import Program

_FLOAT32: Final = (2 - 2.0**-24) * 2.0**127
_FLOAT16: Final = (2 - 2.0**-11) * 2.0**15
"""Smallest numbers that are rounded to infinity."""
_NORM: Final = 2.0**64
"""Smallest norm whose square overflows float32, in which models normalise rows: they become zeros or NaN."""


def check_overflow(program: Program, dtype: str, strengths: Mapping[str, float] | None = None) -> None:
    """Check that the model can compute with what edits with a known norm add to a row of zeros.

    Args:
        program: The program.
        dtype: Name of the model's dtype.
        strengths: New live strengths of a running request by name; only the edits that they scale are checked.

    Raises:
        SteeringError: A factor overflows float32, in which edits are computed; a component overflows the model's dtype;
            or the square of a norm overflows float32.
    """
    norms: dict[int, float] = {}
    for index, edit in enumerate(program.edits):
        factor = 1.0 if strengths is None else strengths.get(edit.live)
        problem = None if factor is None else _problem(edit, program, norms, factor, dtype)
        if problem is not None:
            source = program.edit_source(index)
            if strengths is None:
                raise SteeringError(source, f"{problem}; use a smaller strength or value")
            raise SteeringError(edit.live, f"with {factor:g}, {source}: {problem}; use a smaller strength")


def _problem(edit: CompiledEdit, program: Program, norms: dict[int, float], factor: float, dtype: str) -> str | None:
    """Return how what an edit adds overflows, or None. ``norms`` keeps the norms of vectors that edits share."""
    kind, strength = KIND_OF[edit.code], abs(edit.strength * factor)
    if edit.is_pending or kind not in ("add", "replace", "feature", "clamp"):
        return None
    begin = f"{kind} at {POINT_NAMES[edit.point]}"
    scale = strength * (abs(edit.low) if edit.feature and edit.feature.sets else 1.0)
    if (largest := max(strength, scale)) >= _FLOAT32:
        return f"{begin} has the factor {largest:.5g}, which overflows float32 (factors must be below {_FLOAT32:.5g})"
    norm = strength * max(edit.low, -edit.high, 0.0) if kind == "clamp" else added_norm(edit, program, norms, factor)
    if norm >= _NORM:
        problem = f"{begin} adds a norm of {norm:.5g}, whose square overflows float32, in which models normalise rows"
        return f"{problem} (norms must be below {_NORM:.5g})"
    if dtype == "float16" and norm >= _FLOAT16:
        largest = _largest_component(edit, program, norm if kind == "clamp" else scale)
        if largest >= _FLOAT16:
            return f"{begin} adds {largest:.5g}, which overflows float16 (numbers must be below {_FLOAT16:.5g})"
    return None


def _largest_component(edit: CompiledEdit, program: Program, factor: float) -> float:
    """Return the largest component that an edit adds to a row of zeros."""
    if not edit.coordinates:
        vectors = edit.vectors[-1:] if edit.feature else edit.vectors
        return factor * max(float(np.abs(program.vector(index)).max()) for index in vectors)
    basis = np.stack([program.vector(index) for index in edit.vectors]).astype(np.float64)
    return factor * float(np.abs(edit.coordinate_array().astype(np.float64).T @ basis).max())
