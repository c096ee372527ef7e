# SPDX-License-Identifier: Apache-2.0
"""Readouts of a running sample, assembled from the records of its tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_steer.capture.readouts import FloatArray, Readouts, SteeringTrace
from vllm_steer.capture.row_assembler import RowAssembler
from vllm_steer.capture.step_rows import IntArray
from vllm_steer.program import Program
from vllm_steer.program.readouts import CompiledReadout
from vllm_steer.program.records import STOP_REASON_PREFIX
from vllm_steer.request.selector import Interval


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
