# SPDX-License-Identifier: Apache-2.0
"""Refusal of edits whose own numbers multiply to infinity, whatever the row that they change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES
from vllm_steer.program.compiled_edit import CompiledEdit
from vllm_steer.program.instructions import KIND_OF
from vllm_steer.program.program import Program

_OVERFLOW: Final[Mapping[str, float]] = {
    name: (2 - 2.0 ** -(bits + 1)) * 2.0**exponent
    for name, bits, exponent in (("float32", 23, 127), ("bfloat16", 7, 127), ("float16", 10, 15))
}
"""Smallest number that is rounded to infinity, by dtype, from the bits of its fraction and its largest exponent."""


def check_overflow(program: Program, dtype: str, strengths: Mapping[str, float] | None = None) -> None:
    """Check that `add`, `replace` and `feature` edits add finite numbers to a row of zeros.

    Args:
        program: The program.
        dtype: Name of the model's dtype.
        strengths: New live strengths of a running request by name; only the edits that they scale are checked.

    Raises:
        SteeringError: A product overflows float32, in which edits are computed, or the model's dtype.
    """
    for index, edit in enumerate(program.edits):
        factor = 1.0 if strengths is None else strengths.get(edit.live)
        problem = None if factor is None else _problem(edit, program, edit.strength * factor, dtype)
        if problem is not None:
            source = program.edit_source(index)
            if strengths is None:
                raise SteeringError(source, f"{problem}; use a smaller strength or value")
            raise SteeringError(edit.live, f"with {factor:g}, {source}: {problem}; use a smaller strength")


def _problem(edit: CompiledEdit, program: Program, strength: float, dtype: str) -> str | None:
    """Return how the products of an edit overflow, or None."""
    if edit.is_pending or KIND_OF[edit.code] not in ("add", "replace", "feature"):
        return None
    factor, largest = _products(edit, program, abs(strength), _OVERFLOW[dtype])
    for value, name in ((max(abs(strength), factor), "float32"), (largest, dtype)):
        if value >= _OVERFLOW[name]:
            return (
                f"{KIND_OF[edit.code]} at {POINT_NAMES[edit.point]} multiplies its numbers to {value:.5g}, which "
                f"overflows {name} (numbers must be below {_OVERFLOW[name]:.5g})"
            )
    return None


def _products(edit: CompiledEdit, program: Program, strength: float, limit: float) -> tuple[float, float]:
    """Return the largest factor of a direction, and the largest component that the edit adds to a row of zeros."""
    if edit.feature:
        factor = strength * (abs(edit.low) if edit.feature.sets else 1.0)
        return factor, factor * float(np.abs(program.vector(edit.vectors[-1])).max())
    if not edit.coordinates:
        return strength, strength * max(float(np.abs(program.vector(index)).max()) for index in edit.vectors)
    coordinates = edit.coordinate_array().astype(np.float64)
    factor = strength * float(np.abs(coordinates).max())
    # No component is larger than the norm, because the basis is orthonormal; rounding of the basis is far below 1%.
    largest = strength * float(np.linalg.norm(coordinates, axis=0).max())
    if largest * 1.01 >= limit:
        basis = np.stack([program.vector(index) for index in edit.vectors]).astype(np.float64)
        largest = strength * float(np.abs(coordinates.T @ basis).max())
    return factor, largest
