# SPDX-License-Identifier: Apache-2.0
"""Refusal of edits and readouts whose own numbers are too large to compute with, whatever the row."""

from __future__ import annotations

from collections.abc import Mapping
from math import log2
from typing import Final

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES
from vllm_steer.program.compiled_edit import CompiledEdit
from vllm_steer.program.instructions import KIND_OF
from vllm_steer.program.magnitude import added_norm
from vllm_steer.program.program import ALL_LAYERS, Program
from vllm_steer.request.projection import TOO_LARGE, products_overflow

_FLOAT32: Final = (2 - 2.0**-24) * 2.0**127
_FLOAT16: Final = (2 - 2.0**-11) * 2.0**15
"""Smallest numbers that are rounded to infinity."""
_NORM: Final = 2.0**64
"""Smallest norm whose square overflows float32, in which models normalise rows: they become zeros or NaN."""
_GROWTH: Final = 40.0
"""Largest power of 2 by which edits that scale with the row may lengthen it. Rows are shorter than 2^24, the rest of
the distance to `_NORM`."""


def check_overflow(program: Program, dtype: str, num_layers: int, strengths: Mapping[str, float] | None = None) -> None:
    """Check that the model can compute with what edits with a known norm add to a row of zeros, and with readouts.

    Edits are checked one by one, and then together, as if all applied to one token.

    Args:
        program: The program.
        dtype: Name of the model's dtype.
        num_layers: The model's number of layers.
        strengths: New live strengths of a running request by name; only the edits that they scale are checked one by
            one. In the sum, other live edits have the strength with which the request began.

    Raises:
        SteeringError: A factor overflows float32, in which edits are computed; a component overflows the model's dtype;
            the square of a norm overflows float32; or edits that scale with the row lengthen it too much.
    """
    norms: dict[int, float] = {}
    for index, edit in enumerate(program.edits):
        factor = 1.0 if strengths is None else strengths.get(edit.live)
        problem = None if factor is None else _problem(edit, program, norms, factor, dtype)
        if problem is not None:
            raise _error(program, index, strengths, f"{problem}; use a smaller strength or value")
    _check_together(program, num_layers, norms, strengths)
    if strengths is None:
        for index, readout in enumerate(program.readouts):
            if any(products_overflow(program.vector(vector)) for vector in readout.vectors):
                raise SteeringError(program.readout_source(index), TOO_LARGE)


def _check_together(
    program: Program, num_layers: int, norms: dict[int, float], strengths: Mapping[str, float] | None
) -> None:
    """Check what all edits add to one token at all of their layers, and how much they lengthen its row."""
    added, growth = dict[int, float](), dict[int, float]()
    for index, edit in enumerate(program.edits):
        if edit.is_pending or not edit.strength:
            continue
        factor = 1.0 if strengths is None else strengths.get(edit.live, 1.0)
        layers = num_layers if edit.layers == ALL_LAYERS else len(edit.layers)
        added[index] = layers * _norm(edit, program, norms, factor)
        growth[index] = layers * _growth(edit, program, factor)
    for sizes, largest, what in (
        (added, _NORM, f"edits add a norm of {{:.5g}} at all of their layers (the sum must be below {_NORM:.5g})"),
        (growth, _GROWTH, f"edits lengthen rows by a factor of up to 2^{{:.0f}} (at most 2^{_GROWTH:.0f} is allowed)"),
    ):
        if sizes and (total := sum(sizes.values())) >= largest:
            first = max(sizes, key=lambda index: (_changes(program, index, strengths), sizes[index]))
            problem = f"with it, {what.format(total)}, so that the model's norms overflow float32"
            raise _error(program, first, strengths, f"{problem}; use smaller strengths or fewer layers")


def _changes(program: Program, index: int, strengths: Mapping[str, float] | None) -> bool:
    """Return whether an edit's strength is new."""
    return strengths is None or program.edits[index].live in strengths


def _error(program: Program, index: int, strengths: Mapping[str, float] | None, problem: str) -> SteeringError:
    """Return the error of an edit, at its path or at the name of the live strength that is set."""
    source, live = program.edit_source(index), program.edits[index].live
    if strengths is None or live not in strengths:
        return SteeringError(source, problem)
    return SteeringError(live, f"with {strengths[live]:g}, {source}: {problem}")


def _norm(edit: CompiledEdit, program: Program, norms: dict[int, float], factor: float) -> float:
    """Return the norm that an edit adds to a row of zeros; 0 for edits that scale with the row."""
    if KIND_OF[edit.code] == "clamp":
        return abs(edit.strength * factor) * max(edit.low, -edit.high, 0.0)
    return added_norm(edit, program, norms, factor)


def _growth(edit: CompiledEdit, program: Program, factor: float) -> float:
    """Return the power of 2 by which an edit may lengthen a row; 0 if it at most doubles the row.

    Doublings are not counted, so an `add_normed` of strength 1 at each of many layers is not refused.
    """
    kind, strength = KIND_OF[edit.code], edit.strength * factor
    if kind == "add" or (edit.feature is not None and not edit.feature.sets):
        return 0.0
    if kind == "feature":
        encoder, decoder = (float(np.linalg.norm(program.vector(index).astype(np.float64))) for index in edit.vectors)
        grown = 1 + abs(strength) * encoder * decoder
    else:
        grown = 1 + abs(strength) if kind == "add_normed" else abs(1 - strength)
    return log2(grown) if grown > 2 else 0.0


def _problem(edit: CompiledEdit, program: Program, norms: dict[int, float], factor: float, dtype: str) -> str | None:
    """Return how what an edit adds overflows, or None. ``norms`` keeps the norms of vectors that edits share."""
    kind, strength = KIND_OF[edit.code], abs(edit.strength * factor)
    if edit.is_pending or kind not in ("add", "replace", "feature", "clamp"):
        return None
    begin = f"{kind} at {POINT_NAMES[edit.point]}"
    scale = strength * (abs(edit.low) if edit.feature and edit.feature.sets else 1.0)
    if (largest := max(strength, scale)) >= _FLOAT32:
        return f"{begin} has the factor {largest:.5g}, which overflows float32 (factors must be below {_FLOAT32:.5g})"
    norm = _norm(edit, program, norms, factor)
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
