# SPDX-License-Identifier: Apache-2.0
"""Refusal of edits and readouts whose numbers are so large that the model cannot compute with the rows or values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import hypot, log2, sqrt
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.points import OPTIONAL_POINTS, POINT_NAMES
from vllm_steer.program.compiled_edit import CompiledEdit
from vllm_steer.program.instructions import KIND_OF
from vllm_steer.program.magnitude import added_norm
from vllm_steer.program.program import ALL_LAYERS, Program
from vllm_steer.request.projection import TOO_LARGE, products_overflow
from vllm_steer.request.references import GLOBAL_SOURCE
from vllm_steer.request.selector import OPEN_END, Selector, Wire

_FLOAT32: Final = (2 - 2.0**-24) * 2.0**127
"""Smallest number that is rounded to infinity."""
_NO_INTERVAL: Final = np.empty((0, 2), np.int64)
_EVERYWHERE: Final = np.array([[0, OPEN_END]])
_MOST_GROWTH: Final = 1000.0
"""Power of 2 that replaces larger ones, so that no sum of growths is infinite."""
_MOST_ITEMS: Final = 1 << 13
"""Positions and pairs of all edits up to which the tokens that edits share are looked for."""


class _Bound(NamedTuple):
    """Bound of the norm of a token's row after its edits."""

    norm: float
    """Smallest norm that is refused."""
    own: float
    """Norm below which the model's own rows are taken to be."""
    dtype: str = "float32"
    """Name of the dtype in which the model overflows."""

    @property
    def power(self) -> float:
        """Power of 2 by which edits may lengthen one of the model's own rows."""
        return log2(self.norm / self.own)

    def reached(self, size: _Size) -> float:
        """Return the power of 2 below which a row is after edits of this size."""
        return log2(self.own + size.added) + size.growth


_STREAM: Final = _Bound(2.0**64 * (1 - 2.0**-7), 2.0**24)
"""The square of 2^64 overflows float32, in which models normalise rows: they become zeros or NaN. Rounding to bfloat16
lengthens a row by less than 2^-8."""
_MLP: Final = _Bound(2.0**24, 2.0**10)
"""A gated MLP multiplies two projections of its input."""
_MLP_GAIN: Final = 13.0
"""Power of 2 of the norm that an MLP returns for an input of norm 1, which grows with the square of the input. It was
2^12.2 for the worst direction that was found in a layer of SmolLM2-135M, and 2^3.5 for random ones."""
_BOUNDS_OF_FLOAT16: Final = _Bound(2.0**16, 2.0**12, "float16"), _Bound(2.0**8, 2.0**6, "float16")
"""Bounds in the stream and at the input of an MLP. The largest number is 65504."""


class _Reach(NamedTuple):
    """Intervals, ``[n, 2]``, that contain the tokens of a selection for every length of the prompt.

    A token of the prompt is selected only if its position from the start is in ``prompt`` or its position from the end
    is in ``from_end``; a generated token only if its position is in ``output`` or its number is in ``generated``.
    """

    prompt: npt.NDArray[np.int64] = _NO_INTERVAL
    from_end: npt.NDArray[np.int64] = _NO_INTERVAL
    output: npt.NDArray[np.int64] = _NO_INTERVAL
    generated: npt.NDArray[np.int64] = _NO_INTERVAL


class _Size(NamedTuple):
    """Bounds of the change that edits make to a row."""

    added: float
    """Norm that they add at all of their layers. Each edit's part is divided by its growth at one layer, which does
    not lengthen it."""
    growth: float
    """Power of 2 by which they lengthen the row."""


def check_overflow(
    program: Program,
    dtype: str,
    num_layers: int,
    strengths: Mapping[str, float] | None = None,
    in_force: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Check that edits leave rows with which the model can compute, and readouts values.

    Edits are checked one by one, and then those together that may apply to one token.

    Args:
        program: The program.
        dtype: Name of the model's dtype.
        num_layers: The model's number of layers.
        strengths: New live strengths of a running request by name; only the edits that they scale are checked one by
            one.
        in_force: Live strengths of the request that have been set before.

    Raises:
        SteeringError: A factor overflows float32, in which edits are computed, or a row may become so long that the
            model's numbers overflow.
    """
    stream, mlp = _BOUNDS_OF_FLOAT16 if dtype == "float16" else (_STREAM, _MLP)
    norms: dict[int, float] = {}
    for index, edit in enumerate(program.edits):
        factor = 1.0 if strengths is None else strengths.get(edit.live)
        problem = None if factor is None else _problem(edit, program, norms, factor, stream)
        if problem is not None:
            raise _error(program, index, strengths, f"{problem}; use a smaller strength or value")
    factors = {**in_force, **(strengths or {})}
    sizes = {
        index: _size(edit, program, norms, factors.get(edit.live, 1.0), num_layers)
        for index, edit in enumerate(program.edits)
        if edit.strength and not edit.is_pending
    }
    at_mlp = {index: size for index, size in sizes.items() if POINT_NAMES[program.edits[index].point] == "mlp_in"}
    _check_together(program, at_mlp, mlp, strengths)
    if at_mlp and mlp is _MLP:  # in float16, the worst direction would rule out all edits
        reached = min(mlp.reached(_sum(at_mlp)), log2(mlp.norm))
        sizes |= dict.fromkeys(at_mlp, _Size(2.0 ** (2 * reached + _MLP_GAIN), 0.0))
    _check_together(program, sizes, stream, strengths)
    if strengths is None:
        for index, readout in enumerate(program.readouts):
            if any(products_overflow(program.vector(vector)) for vector in readout.vectors):
                raise SteeringError(program.readout_source(index), TOO_LARGE)


def _size(edit: CompiledEdit, program: Program, norms: dict[int, float], factor: float, num_layers: int) -> _Size:
    layers = num_layers if edit.layers == ALL_LAYERS else len(edit.layers)
    growth = _growth(edit, program, factor)
    added = layers * _norm(edit, program, norms, factor) * 2.0**-growth
    # Only an edited stream is the input of the edits of later layers.
    return _Size(added, growth if POINT_NAMES[edit.point] in OPTIONAL_POINTS else growth * layers)


def _sum(sizes: Mapping[int, _Size]) -> _Size:
    return _Size(sum(size.added for size in sizes.values()), sum(size.growth for size in sizes.values()))


def _check_together(
    program: Program, sizes: Mapping[int, _Size], bound: _Bound, strengths: Mapping[str, float] | None
) -> None:
    """Check the rows of tokens after all edits that they may have."""
    for size, met in _meetings(program, sizes, bound):
        if bound.reached(size) >= log2(bound.norm):
            first = max(
                met, key=lambda index: (_priority(program, index, strengths), sizes[index].growth, sizes[index])
            )
            raise _error(program, first, strengths, _explained(program, met, size, bound))


def _meetings(program: Program, sizes: Mapping[int, _Size], bound: _Bound) -> Iterator[tuple[_Size, Collection[int]]]:
    """Yield edits that may meet at one token, with their size; all together if they are small or list many tokens."""
    everything = _sum(sizes)
    num_items = sum(_num_items(program.edits[index].tokens) for index in sizes)
    if bound.reached(everything) < log2(bound.norm) or num_items > _MOST_ITEMS:
        yield everything, sizes
        return
    reaches = {index: _reach(program.edits[index].selector) for index in sizes}
    for axes in (("prompt", "from_end"), ("output", "generated")):
        added, growth = (
            [_worst(reaches, axis, {index: size[part] for index, size in sizes.items()}) for axis in axes]
            for part in (0, 1)
        )
        met = {index for _, indices in (*added, *growth) for index in indices}
        yield _Size(sum(most for most, _ in added), sum(most for most, _ in growth)), met


def _num_items(tokens: Wire) -> int:
    """Return the number of positions and pairs of a selection; 0 for names."""
    items = tokens.get("generated", ()) if isinstance(tokens, dict) else tokens
    return 0 if isinstance(items, str) else len(items)


def _reach(selector: Selector) -> _Reach:
    wire = selector.to_wire()
    if wire == "last_prompt":
        return _Reach(from_end=np.array([[-1, 0]]))
    if selector.is_named:
        in_prompt = wire in ("all", "prompt") or selector.is_prompt_part
        return _Reach(
            _EVERYWHERE if in_prompt else _NO_INTERVAL, generated=_EVERYWHERE if selector.is_open else _NO_INTERVAL
        )
    listed = np.array(selector.listed, np.int64)
    if isinstance(wire, dict):
        return _Reach(generated=listed)
    start, stop = listed.T
    is_open = stop == OPEN_END
    return _Reach(
        np.stack([start, np.where(stop > 0, stop, OPEN_END)], 1)[start >= 0],
        np.stack([start, np.minimum(stop, 0)], 1)[start < 0],
        np.stack([np.maximum(start, 0), stop], 1)[(stop > 0) & ((start >= 0) | ~is_open)],
        _EVERYWHERE if (is_open & (start < 0)).any() else _NO_INTERVAL,
    )


def _worst(reaches: Mapping[int, _Reach], axis: str, sizes: Mapping[int, float]) -> tuple[float, list[int]]:
    """Return the largest sum of sizes at one place of an axis, and the edits that have it."""
    each = {index: getattr(reaches[index], axis) for index in sizes if sizes[index]}
    owner = np.repeat(list(each), [len(intervals) for intervals in each.values()]).astype(np.int64)
    if not len(owner):
        return 0.0, []
    first, stop = np.concatenate(list(each.values())).T
    size = np.array([sizes[index] for index in owner.tolist()])
    places = np.concatenate([stop, first])  # at one place, intervals end before others begin
    order = np.argsort(places, kind="stable")
    place = places[order][int(np.cumsum(np.concatenate([-size, size])[order]).argmax())]
    chosen = (first <= place) & (place < stop)
    return float(size[chosen].sum()), owner[chosen].tolist()


def _explained(program: Program, met: Collection[int], size: _Size, bound: _Bound) -> str:
    """Return the problem of edits that overflow together, and what to do."""
    edit = program.edits[next(iter(met))]
    what = f"{len(met)} edits of one token"
    remedy = "use smaller strengths, or select fewer tokens or layers"
    if len(met) == 1:
        what = f"{KIND_OF[edit.code]} of strength {edit.strength:g} at {POINT_NAMES[edit.point]}"
        remedy = "use a smaller strength or fewer layers"
    limit = f"norms must stay below {bound.norm:.5g}, or the model's {bound.dtype} numbers overflow"
    if not size.growth:
        return f"{what} may add a norm of {size.added:.5g}, counting each layer; {limit}; {remedy}"
    if len(met) == 1 and KIND_OF[edit.code] == "add_normed" and not edit.live:
        layers = max(1, round(size.growth / log2(1 + abs(edit.strength))))
        at = f"at {layers} layers, " if layers > 1 else ""
        remedy = f"{at}use a strength below {2 ** (bound.power / layers) - 1:.3g}"
    longer = f"lengthen a row by a factor of 2^{size.growth:.1f}, counting each layer, to a norm of up to 2^"
    return f"{what} may {longer}{bound.reached(size):.0f}; {limit}; {remedy}"


def _priority(program: Program, index: int, strengths: Mapping[str, float] | None) -> tuple[bool, bool]:
    """Return whether an edit's strength is new, and whether the request can change the edit; errors name such edits."""
    is_new = strengths is None or program.edits[index].live in strengths
    return is_new, not program.edit_source(index).startswith(GLOBAL_SOURCE)


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
    norm = added_norm(edit, program, norms, factor)
    if edit.feature is not None and edit.feature.sets:  # it subtracts the encoder's bias as a part of the activation
        decoder = program.vector(edit.vectors[-1]).astype(np.float64)
        norm += abs(edit.strength * factor * edit.feature.bias) * float(np.linalg.norm(decoder))
    return norm


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
    return min(log2(grown), _MOST_GROWTH) if grown > 1 else 0.0


def _norm_of_step(strength: float, encoder: npt.NDArray[np.float64], decoder: npt.NDArray[np.float64]) -> float:
    """Return the norm of the matrix that subtracts ``strength`` times the activation of a feature from a row.

    For the matrix M = ``I - strength * outer(decoder, encoder)``, M^T M - I has at most two eigenvalues other than 0.
    They have the sum and the negative product below.
    """
    e, d, cross = float(encoder @ encoder), float(decoder @ decoder), float(encoder @ decoder)
    total = strength**2 * e * d - 2 * strength * cross
    product = strength**2 * max(e * d - cross**2, 0.0)
    return sqrt(1 + max(total + hypot(total, 2 * sqrt(product)), 0.0) / 2)


def _problem(edit: CompiledEdit, program: Program, norms: dict[int, float], factor: float, bound: _Bound) -> str | None:
    """Return how what an edit adds overflows, or None. ``norms`` keeps the norms of vectors that edits share."""
    kind, strength = KIND_OF[edit.code], abs(edit.strength * factor)
    if edit.is_pending or kind not in ("add", "replace", "feature", "clamp"):
        return None
    begin = f"{kind} at {POINT_NAMES[edit.point]}"
    scale = strength * (abs(edit.low) if edit.feature and edit.feature.sets else 1.0)
    if (largest := max(strength, scale)) >= _FLOAT32:
        return f"{begin} has the factor {largest:.5g}, which overflows float32 (factors must be below {_FLOAT32:.5g})"
    norm, most = _norm(edit, program, norms, factor), bound.norm - bound.own
    if norm < most:
        return None
    why = "with the model's own row" if bound.dtype == "float16" else "when models square it to normalise rows"
    return f"{begin} adds a norm of {norm:.5g}, which overflows {bound.dtype} {why} (norms must be below {most:.5g})"
