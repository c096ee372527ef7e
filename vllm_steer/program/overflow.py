# SPDX-License-Identifier: Apache-2.0
"""Refusal of edits and readouts whose own numbers are too large to compute with, whatever the row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES
from vllm_steer.program.compiled_edit import CompiledEdit
from vllm_steer.program.instructions import KIND_OF
from vllm_steer.program.magnitude import added_norm
from vllm_steer.program.program import ALL_LAYERS, Program
from vllm_steer.request.projection import TOO_LARGE, products_overflow
from vllm_steer.request.selector import OPEN_END, Interval, Selector

_FLOAT32: Final = (2 - 2.0**-24) * 2.0**127
_FLOAT16: Final = (2 - 2.0**-11) * 2.0**15
"""Smallest numbers that are rounded to infinity."""
_NORM: Final = 2.0**64
"""Smallest norm whose square overflows float32, in which models normalise rows: they become zeros or NaN."""
_LONGEST_ROW: Final = 24.0
"""Power of 2 below which the norms of a model's own rows are."""
_GROWTH: Final = log2(_NORM) - _LONGEST_ROW
"""Power of 2 by which edits may lengthen such a row."""
_MLP_NORM: Final = 2.0**30
"""Smallest norm at the input of an MLP that is refused: a gated MLP multiplies two projections of it."""
_MLP_GROWTH: Final = log2(_MLP_NORM) - 14.0
"""Power of 2 by which edits may lengthen a row there. The norm ahead of the MLP keeps rows shorter than 2^14."""
_MLP_IN: Final = POINT_NAMES.index("mlp_in")
_STREAM: Final = tuple(POINT_NAMES.index(name) for name in ("pre_attn", "post_attn", "post_block"))
"""Points at which what an edit makes of a row reaches the edits of later layers."""


class _Reach(NamedTuple):
    """Where a selection may be, whatever the length of the prompt, in intervals.

    A token of the prompt is selected only if its position from the start is in ``prompt`` or its position from the end
    is in ``from_end``; a generated token only if its position is in ``output`` or its number is in ``generated``.
    """

    prompt: Sequence[Interval] = ()
    from_end: Sequence[Interval] = ()
    output: Sequence[Interval] = ()
    generated: Sequence[Interval] = ()


class _Size(NamedTuple):
    """What an edit may do to a row."""

    added: float
    """Norm that it adds at all of its layers, ahead of its own growth at one of them."""
    growth: float
    """Power of 2 by which it lengthens the row."""


def check_overflow(
    program: Program,
    dtype: str,
    num_layers: int,
    strengths: Mapping[str, float] | None = None,
    in_force: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Check that the model can compute with edits, whatever its rows are, and with readouts.

    Edits are checked one by one, and then those together that may apply to one token.

    Args:
        program: The program.
        dtype: Name of the model's dtype.
        num_layers: The model's number of layers.
        strengths: New live strengths of a running request by name; only the edits that they scale are checked one by
            one.
        in_force: Live strengths of the request that have been set before.

    Raises:
        SteeringError: A factor overflows float32, in which edits are computed; a component overflows the model's dtype;
            or the square of a norm overflows float32, in which models normalise rows.
    """
    norms: dict[int, float] = {}
    for index, edit in enumerate(program.edits):
        factor = 1.0 if strengths is None else strengths.get(edit.live)
        problem = None if factor is None else _problem(edit, program, norms, factor, dtype)
        if problem is not None:
            raise _error(program, index, strengths, f"{problem}; use a smaller strength or value")
    factors = {**in_force, **(strengths or {})}
    sizes = {
        index: _size(edit, program, norms, factors.get(edit.live, 1.0), num_layers)
        for index, edit in enumerate(program.edits)
        if edit.strength and not edit.is_pending
    }
    _check_together(program, sizes, strengths)
    mlp = {index: sizes[index] for index in sizes if program.edits[index].point == _MLP_IN}
    _check_together(program, mlp, strengths, _MLP_NORM, _MLP_GROWTH)
    if strengths is None:
        for index, readout in enumerate(program.readouts):
            if any(products_overflow(program.vector(vector)) for vector in readout.vectors):
                raise SteeringError(program.readout_source(index), TOO_LARGE)


def _size(edit: CompiledEdit, program: Program, norms: dict[int, float], factor: float, num_layers: int) -> _Size:
    layers = num_layers if edit.layers == ALL_LAYERS else len(edit.layers)
    growth = _growth(edit, program, factor)
    added = layers * _norm(edit, program, norms, factor) * 2.0**-growth
    # What an edit makes of a branch does not reach the branches of later layers.
    return _Size(added, growth * (layers if edit.point in _STREAM else 1))


def _check_together(
    program: Program,
    sizes: Mapping[int, _Size],
    strengths: Mapping[str, float] | None,
    norm: float = _NORM,
    growth: float = _GROWTH,
) -> None:
    """Check a token's row after all edits that it may have, against the power of 2 that its norm must stay below."""

    def exceeds(added: float, grown: float) -> bool:
        return log2(norm * 2**-growth + added) + grown >= log2(norm)

    if not exceeds(sum(size.added for size in sizes.values()), sum(size.growth for size in sizes.values())):
        return  # as if all edits had all tokens
    reaches = {index: _reach(program.edits[index].selector) for index in sizes}
    for axes in (("prompt", "from_end"), ("output", "generated")):
        added = [_worst(reaches, axis, {index: size.added for index, size in sizes.items()}) for axis in axes]
        grown = [_worst(reaches, axis, {index: size.growth for index, size in sizes.items()}) for axis in axes]
        total, power = sum(most for most, _ in added), sum(most for most, _ in grown)
        if exceeds(total, power):
            met = {index for _, indices in (*added, *grown) for index in indices}
            first = max(met, key=lambda index: (_changes(program, index, strengths), sizes[index].growth, sizes[index]))
            raise _error(program, first, strengths, _explained(program, met, total, power, norm, growth))


def _reach(selector: Selector) -> _Reach:
    wire, everywhere = selector.to_wire(), ((0, OPEN_END),)
    if wire == "last_prompt":
        return _Reach(from_end=((-1, 0),))
    if selector.is_named:
        in_prompt = wire in ("all", "prompt") or selector.is_prompt_part
        return _Reach(everywhere if in_prompt else (), generated=everywhere if selector.is_open else ())
    if isinstance(wire, dict):
        return _Reach(generated=selector.listed)
    where = selector.listed
    return _Reach(
        [(start, stop if stop > 0 else OPEN_END) for start, stop in where if start >= 0],
        [(start, min(stop, 0)) for start, stop in where if start < 0],
        [(max(start, 0), stop) for start, stop in where if stop > 0 and (start >= 0 or stop < OPEN_END)],
        everywhere if any(start < 0 and stop == OPEN_END for start, stop in where) else (),
    )


def _worst(reaches: Mapping[int, _Reach], axis: str, sizes: Mapping[int, float]) -> tuple[float, list[int]]:
    """Return the largest sum of sizes at one place of an axis, and the edits that have it."""
    each = [(first, stop, index) for index in sizes if sizes[index] for first, stop in getattr(reaches[index], axis)]
    if not each:
        return 0.0, []
    intervals = np.array(each, dtype=np.int64)
    size = np.array([sizes[index] for index in intervals[:, 2]])
    places = np.concatenate([intervals[:, 1], intervals[:, 0]])  # at one place, intervals end before others begin
    order = np.argsort(places, kind="stable")
    sums = np.cumsum(np.concatenate([-size, size])[order])
    place = places[order][int(sums.argmax())]
    chosen = (intervals[:, 0] <= place) & (place < intervals[:, 1])
    return float(size[chosen].sum()), intervals[chosen, 2].tolist()


def _explained(program: Program, met: set[int], added: float, power: float, norm: float, growth: float) -> str:
    """Return the problem of edits that overflow together, and what to do."""
    edit = program.edits[next(iter(met))]
    what = f"{len(met)} edits of one token"
    remedy = "use smaller strengths, or select fewer tokens or layers"
    if len(met) == 1:
        what = f"{KIND_OF[edit.code]} of strength {edit.strength:g} at {POINT_NAMES[edit.point]}"
        remedy = "use a smaller strength or fewer layers"
    limit = f"norms must stay below {norm:.5g}, since their squares overflow float32 in the model"
    if not power:
        return f"{what} may add a norm of {added:.5g}, counting each layer; {limit}; {remedy}"
    if len(met) == 1 and edit.point in _STREAM and KIND_OF[edit.code] == "add_normed" and not edit.live:
        layers = round(power / log2(1 + abs(edit.strength)))
        at = f"at {layers} layers, " if layers > 1 else ""
        remedy = f"{at}use a strength below {2 ** (growth / layers) - 1:.3g}"
    reached = log2(norm * 2**-growth + added) + power
    longer = f"lengthen a row by a factor of 2^{power:.1f}, counting each layer, to a norm of up to 2^{reached:.0f}"
    return f"{what} may {longer}; {limit}; {remedy}"


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
    """Return the power of 2 by which an edit may lengthen a row at one layer."""
    kind, strength = KIND_OF[edit.code], edit.strength * factor
    if kind == "add" or (edit.feature is not None and not edit.feature.sets):
        return 0.0
    if kind == "feature":
        encoder, decoder = (program.vector(index).astype(np.float64) for index in edit.vectors)
        grown = _norm_of_step(strength, encoder, decoder)
    else:
        grown = 1 + abs(strength) if kind == "add_normed" else abs(1 - strength)
    return log2(grown) if grown > 1 else 0.0


def _norm_of_step(strength: float, encoder: npt.NDArray[np.float64], decoder: npt.NDArray[np.float64]) -> float:
    """Return the norm of the matrix that subtracts ``strength`` times the activation of a feature from a row.

    It is ``I - strength * outer(decoder, encoder)``. Its square differs from the identity on the plane of both vectors
    only, where it has the trace and the determinant below.
    """
    e, d, product = float(encoder @ encoder), float(decoder @ decoder), float(encoder @ decoder)
    trace = strength**2 * e * d - 2 * strength * product
    determinant = strength**2 * (e * d - product**2)
    return float(np.sqrt(1 + max(trace + np.sqrt(trace**2 + 4 * determinant), 0.0) / 2))


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
