# SPDX-License-Identifier: Apache-2.0
"""Matrices by position: the operand of each position of a segment, and the steps that an edit runs there.

The operands of a segment form one run on the device. A token finds its own by its distance from the segment's start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.program.compiled_edit import CompiledEdit, CompiledFeature
from vllm_steer.program.instructions import ADD, CLAMP, FEATURE, MEASURE, REPLACE_AT, SET_AT
from vllm_steer.program.program import Program
from vllm_steer.request.matrix import check_row_count
from vllm_steer.request.selector import Interval

NO_OPERAND = -1
"""Operand of a position that the edit does not cover. As the bits of a float32, it is a NaN."""
NO_RUN = -1
MAX_GAP = 256
"""Longest gap between two positions of a matrix that does not begin another segment."""


class EditStep(msgspec.Struct, frozen=True, array_like=True):
    """One instruction of an edit: code, digest of its vector, low, high, and the number of its run."""

    code: int
    vector: bytes
    low: float
    high: float
    run: int = NO_RUN


class PositionRun(msgspec.Struct, frozen=True, array_like=True):
    """The operands of consecutive positions.

    Either ``vectors`` holds the digest of each position's row, empty for positions that are not covered, or ``bits``
    holds float32 numbers, of which :data:`NO_OPERAND` marks these positions.
    """

    vectors: tuple[bytes, ...] = ()
    bits: bytes = b""

    def __len__(self) -> int:
        return len(self.vectors) or len(self.bits) // 4

    def operands(self, index_of: Mapping[bytes, int]) -> npt.NDArray[np.int32]:
        """Return the operands as int32; ``index_of`` has the places of vectors by digest."""
        if self.bits:
            return np.frombuffer(self.bits, "<i4")
        places = (index_of[digest] if digest else NO_OPERAND for digest in self.vectors)
        return np.fromiter(places, np.int32, len(self.vectors))


def covered_intervals(program: Program, number: int, prompt_len: int) -> tuple[Interval, ...]:
    """Return the intervals in which an edit is active: its selection, for a matrix with short gaps filled.

    Raises:
        SteeringError: The selector does not fit the prompt, or a matrix has another number of rows than it selects
            positions.
    """
    edit, source = program.edits[number], program.edit_source(number)
    intervals = edit.selector.intervals(prompt_len, f"{source}.tokens")
    if not edit.num_rows:
        return intervals
    selected = f"{source}.tokens selects, with a prompt of {prompt_len} tokens,"
    check_row_count(edit.num_rows, sum(stop - start for start, stop in intervals), f"{source}.vector", selected)
    if not edit.selector.keeps_order(prompt_len):
        raise SteeringError(
            f"{source}.tokens",
            f"with a prompt of {prompt_len} tokens, positions counted from its end come before others in the list; "
            "with a matrix, list positions in ascending order",
        )
    filled = [list(intervals[0])]
    for (_, stop), (start, end) in pairwise(intervals):
        if start - stop <= MAX_GAP:
            filled[-1][1] = end
        else:
            filled.append([start, end])
    return tuple((start, stop) for start, stop in filled)


def edit_steps(
    program: Program, edits: Iterable[int], prompt_len: int, start: int, stop: int
) -> tuple[tuple[tuple[EditStep, ...], ...], tuple[PositionRun, ...]]:
    """Return the steps of each edit for the positions ``[start, stop)``, and the runs that they refer to."""
    steps: list[tuple[EditStep, ...]] = []
    runs: list[PositionRun] = []
    for number in edits:
        edit = program.edits[number]
        vectors = [program.digests[index] for index in edit.vectors]
        if not edit.strength:
            # It has columns in the records of its tokens, but changes nothing.
            steps.append(())
        elif edit.feature is not None:
            steps.append(_feature_steps(edit, edit.feature, vectors))
        elif edit.num_rows:
            first = len(runs)
            runs += _runs(program, edit, edit.selector.intervals(prompt_len), start, stop)
            if edit.coordinates:
                steps.append(tuple(EditStep(SET_AT, v, 0.0, 0.0, first + i) for i, v in enumerate(vectors)))
            else:
                steps.append((EditStep(REPLACE_AT, vectors[0], 0.0, 0.0, first),))
        elif edit.coordinates:
            values = edit.coordinate_array()[:, 0].tolist()
            steps.append(tuple(EditStep(CLAMP, v, c, c) for v, c in zip(vectors, values, strict=True)))
        else:
            steps.append(tuple(EditStep(edit.code, vector, edit.low, edit.high) for vector in vectors))
    return tuple(steps), tuple(runs)


def _feature_steps(edit: CompiledEdit, feature: CompiledFeature, vectors: Sequence[bytes]) -> tuple[EditStep, ...]:
    if not feature.sets:
        return (EditStep(ADD, vectors[-1], 0.0, 0.0),)
    measure = EditStep(MEASURE, vectors[0], feature.bias, feature.threshold)
    return measure, EditStep(FEATURE, vectors[-1], edit.low, edit.high)


def _runs(
    program: Program, edit: CompiledEdit, intervals: tuple[Interval, ...], start: int, stop: int
) -> list[PositionRun]:
    """Return one run of rows, or one run of coordinates for each direction of the basis."""
    number_of = np.full(stop - start, NO_OPERAND, np.int64)
    before = 0
    for first, end in intervals:
        low, high = max(first, start), min(end, stop)
        if low < high:
            number_of[low - start : high - start] = np.arange(before + low - first, before + high - first)
        before += end - first
    if not edit.coordinates:
        digests = [program.digests[index] for index in edit.vectors]
        return [PositionRun(vectors=tuple(digests[i] if i != NO_OPERAND else b"" for i in number_of.tolist()))]
    # Coordinates are finite, so none has the bits of NO_OPERAND.
    return [
        PositionRun(bits=np.where(number_of < 0, NO_OPERAND, values[number_of]).astype("<i4").tobytes())
        for values in edit.coordinate_array().view("<i4")
    ]
