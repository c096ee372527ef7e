# SPDX-License-Identifier: Apache-2.0
"""Readouts and traces of a request, assembled from the records of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_steer.capture.row_assembler import RowAssembler
from vllm_steer.capture.step_rows import IntArray
from vllm_steer.program import Program
from vllm_steer.program.readouts import CompiledReadout
from vllm_steer.program.records import STOP_REASON_PREFIX
from vllm_steer.request.selector import Interval

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Readouts:
    """Values of one readout of one request, by position."""

    positions: IntArray
    """``[n]`` int64, ascending: positions in the prompt and the generated tokens together, from 0.

    The last token has a value only if a stop on it ended the request; otherwise it is not forwarded.
    """
    values: FloatArray
    """float32 ``[n]`` for a probe, ``[n, k]`` for projections and ``sae``, ``[n, layers, k]`` for ``lens``."""
    indices: npt.NDArray[np.int32] | None = None
    """int32 in the shape of ``values``, largest value first: features of ``sae`` (-1 if fewer than k are active), or
    tokens of ``lens``; None for other readouts."""

    @property
    def token_ids(self) -> npt.NDArray[np.int32] | None:
        """Token ids of ``lens``; equal to `indices`."""
        return self.indices

    @property
    def logprobs(self) -> FloatArray:
        """Log-probabilities of ``lens``; equal to `values`."""
        return self.values


@dataclass(frozen=True, eq=False)
class SteeringTrace:
    """Factors of the gated and live edits of one request at its generated tokens."""

    positions: IntArray
    """``[n]`` int64, ascending."""
    gates: FloatArray
    """float32 ``[n, gated edits]``: the factor in force, in the order of the request's edits that have ``when`` or
    whose ``tokens`` are a part of the output.

    0 at tokens that the edit does not cover."""
    live: Mapping[str, FloatArray]
    """float32 ``[n]`` by name: the live strength in force."""
    num_covered: int = 0
    """Number of tokens that the gated edits cover, summed over the edits."""
    controller_error: str | None = None
    """Error of the sample's controller, after which the live strengths have not changed, or None."""


class ReadoutStream:
    """Readouts of one sample, whole and in deltas.

    Args:
        program: The request's program.
        assembler: Collects the sample's records.
    """

    def __init__(self, program: Program, assembler: RowAssembler) -> None:
        self.program = program
        self._assembler = assembler
        self._next_chunk = 0
        self._next_position = 0

    @property
    def live_names(self) -> tuple[str, ...]:
        """Names of the request's live strengths."""
        return tuple(self.program.layout.live)

    def stopped_by(self, stop_reason: object) -> bool:
        """Return whether a request with this ``stop_reason`` was ended by a readout."""
        return bool(self.program.stops) and isinstance(stop_reason, str) and stop_reason.startswith(STOP_REASON_PREFIX)

    def next_delta(self, prompt_len: int, num_tokens: int) -> dict[str, Readouts]:
        """Return the values of the tokens confirmed since the last delta.

        Records of later tokens are kept: they belong to drafts, or to tokens whose output is yet to be processed.

        Args:
            prompt_len: Number of prompt tokens.
            num_tokens: Number of prompt and generated tokens, including the last sampled one, which has no record.
        """
        fresh, self._next_chunk = self._assembler.since(self._next_chunk, num_tokens - 1)
        first, self._next_position = self._next_position, num_tokens - 1
        positions, records = fresh.records(num_tokens - 1)
        start = int(np.searchsorted(positions, first))
        return self._readouts(positions[start:], records[start:], prompt_len)

    def result(self, prompt_len: int, num_tokens: int) -> tuple[dict[str, Readouts], SteeringTrace | None]:
        """Return all values and, for a request with gated or live edits, its trace; arguments as of `next_delta`."""
        positions, records = self._assembler.records(num_tokens - 1)
        layout = self.program.layout
        trace = None
        if layout.gates or layout.live:
            start = int(np.searchsorted(positions, prompt_len))
            generated = records[start:]
            live = {name: _columns(generated, column, 1)[:, 0] for name, column in layout.live.items()}
            columns = [_columns(generated, column, 1) for column in layout.gates.values()]
            gates = np.concatenate([np.empty((len(generated), 0), np.float32), *columns], axis=1)
            covered = 0
            for place, number in enumerate(layout.gates):
                inside = _inside(positions[start:], self.program.edits[number].selector.intervals(prompt_len))
                gates[~inside, place] = 0.0
                covered += int(inside.sum())
            trace = SteeringTrace(positions[start:], gates, live, covered)
        return self._readouts(positions, records, prompt_len), trace

    def _readouts(self, positions: IntArray, records: FloatArray, prompt_len: int) -> dict[str, Readouts]:
        found = {}
        for readout, column in zip(self.program.readouts, self.program.layout.readouts, strict=True):
            wanted = _inside(positions, readout.selector.intervals(prompt_len))
            if readout.parts:
                wanted &= _columns(records, self.program.layout.parts[readout.parts], 1)[:, 0] != 0
            values = _columns(records, column, readout.width)[wanted]
            found[readout.name] = _values(readout, positions[wanted], values)
        return found


def _values(readout: CompiledReadout, positions: IntArray, columns: FloatArray) -> Readouts:
    """Return the values of a readout from its columns."""
    if not readout.kind.has_head:
        return Readouts(positions, columns[:, 0] if readout.scalar else columns)
    shape = (len(positions), *((len(readout.layers),) if readout.kind.has_layers else ()), readout.top_k)
    both = columns.reshape(len(positions), len(readout.layers), 2, readout.top_k)
    return Readouts(
        positions, both[:, :, 1].reshape(shape).copy(), both[:, :, 0].reshape(shape).astype(np.int32)
    )  # fmt: skip


def merge_readouts(
    first: Mapping[str, Readouts] | None, second: Mapping[str, Readouts] | None
) -> Mapping[str, Readouts] | None:
    """Concatenate two consecutive deltas; either may be missing."""
    if not first or not second:
        return first or second
    return {
        name: Readouts(
            np.concatenate((first[name].positions, each.positions)),
            np.concatenate((first[name].values, each.values)),
            _joined(first[name].indices, each.indices),
        )
        for name, each in second.items()
    }


def _joined(first: npt.NDArray[np.int32] | None, second: npt.NDArray[np.int32] | None) -> npt.NDArray[np.int32] | None:
    return None if first is None or second is None else np.concatenate((first, second))


def _columns(records: FloatArray, column: int, width: int) -> FloatArray:
    """Return a copy of some columns; without records, an empty array of the right shape."""
    if not len(records):
        return np.empty((0, width), dtype=np.float32)
    return np.ascontiguousarray(records[:, column : column + width])


def _inside(positions: IntArray, intervals: tuple[Interval, ...]) -> npt.NDArray[np.bool_]:
    inside = np.zeros(len(positions), dtype=bool)
    for start, stop in intervals:
        inside |= (positions >= start) & (positions < stop)
    return inside
