# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the books: what each running request's program occupies in the device tables.

Everything is uploaded once: a vector when the first request that uses it is admitted, a row likewise, a request's
segments when it joins. A step in which no request joins uploads nothing here. All writes are enqueued on the stream on
which the model runs, so a step that is still in flight never sees a later one's tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_steer.config import SteeringConfig
from vllm_steer.params import program_bytes
from vllm_steer.program import Instruction, Ledger, PlacedRow, Program, Resolved, resolve
from vllm_steer.program.instructions import CAPTURE
from vllm_steer.taps.tables import END, Tables


@dataclass(frozen=True)
class _Running:
    slot: int
    resolved: Resolved


class ProgramStore:
    """Places programs in :class:`Tables`; refuses nothing, since the scheduler's ledger admitted all it is given."""

    def __init__(self, tables: Tables, config: SteeringConfig, num_layers: int) -> None:
        self.tables = tables
        self._num_layers = num_layers
        self._max_segments = config.max_segments
        self._ledger = Ledger(config.max_rows, config.max_instructions, config.max_vectors)
        self._running: dict[str, _Running] = {}
        self._capturing = 0

    @property
    def num_steered(self) -> int:
        """Requests in the engine whose tokens may take a row other than 0."""
        return len(self._running)

    @property
    def num_capturing(self) -> int:
        """Requests in the engine some of whose tokens store rows."""
        return self._capturing

    def resolved_of(self, request_id: str) -> Resolved | None:
        running = self._running.get(request_id)
        return None if running is None else running.resolved

    def slot_of(self, request_id: str) -> int | None:
        running = self._running.get(request_id)
        return None if running is None else running.slot

    def add(self, request_id: str, slot: int, sampling_params: Any, prompt_len: int) -> bool:
        """Bind a request to ``slot`` of the segment tables; False where it asks for no edit and needs no slot."""
        data = program_bytes(sampling_params)
        if data is None:
            return False
        program = Program.from_bytes(data)
        resolved = resolve(program, prompt_len, self._num_layers)
        if not resolved.rows:
            return False
        new_rows, new_vectors = self._ledger.acquire(resolved.rows)
        for digest, place in new_vectors.items():
            self._write(self.tables.vector[place], program.vector(program.by_digest[digest]))
        if new_rows:
            self._write_rows(new_rows)
        self._write_segments(slot, resolved)
        self._running[request_id] = _Running(slot, resolved)
        self._capturing += resolved.max_captures > 0
        return True

    def remove(self, request_id: str) -> int | None:
        """Forget a request; its slot takes row 0 from now on. Returns the slot, or None where it held none."""
        running = self._running.pop(request_id, None)
        if running is None:
            return None
        self._capturing -= running.resolved.max_captures > 0
        for row in running.resolved.rows:
            self._ledger.release([row])
            if not self._ledger.holds(row):
                self._count_users(row.instructions, -1)
        self.tables.segment_row[running.slot].zero_()
        return running.slot

    def _write_rows(self, new_rows: list[PlacedRow]) -> None:
        tables = self.tables
        total = sum(len(placed.instruction_places) for placed in new_rows)
        places = np.empty(total, dtype=np.int64)
        records = np.zeros((total, 4), dtype=np.int32)
        numbers = np.zeros((total, 4), dtype=np.float32)
        at = 0
        for placed in new_rows:
            heads = np.zeros(tables.num_sites, dtype=np.int32)
            last_at: dict[int, int] = {}
            for place, instruction in zip(placed.instruction_places, placed.row.instructions, strict=True):
                previous = last_at.get(instruction.site)
                if previous is None:
                    heads[instruction.site] = place
                else:
                    records[previous, 2] = place
                last_at[instruction.site] = at
                places[at] = place
                records[at, :2] = instruction.code, self._argument(instruction)
                numbers[at, :3] = instruction.strength, instruction.low, instruction.high
                at += 1
            self._write(tables.head[placed.place], heads)
            tables.row_captures[placed.place].fill_(len(placed.row.captures))
            self._count_users(placed.row.instructions, 1)
        index = self._upload(places)
        tables.instruction.index_copy_(0, index, self._upload(records))
        tables.parameter.index_copy_(0, index, self._upload(numbers))

    def _argument(self, instruction: Instruction) -> int:
        if instruction.code == CAPTURE:
            return instruction.index
        return self._ledger.vector_place(instruction.vector)

    def _write_segments(self, slot: int, resolved: Resolved) -> None:
        starts = np.full(self._max_segments, END, dtype=np.int32)
        rows = np.zeros(self._max_segments, dtype=np.int32)
        for i, segment in enumerate(resolved.segments):
            starts[i] = segment.start
            rows[i] = self._ledger.row_place(segment.row)
        self._write(self.tables.segment_start[slot], starts)
        self._write(self.tables.segment_row[slot], rows)

    def _count_users(self, instructions: Any, change: int) -> None:
        for site in {instruction.site for instruction in instructions}:
            self.tables.site_users[site] += change

    def _upload(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """Host to device without a sync: pinned memory comes from torch's caching host allocator, which keeps a block
        until the copy out of it has run."""
        tensor = torch.from_numpy(np.array(values))
        if self.tables.device.type == "cuda":
            return tensor.pin_memory().to(self.tables.device, non_blocking=True)
        return tensor

    def _write(self, place: torch.Tensor, values: npt.NDArray[Any]) -> None:
        place.copy_(self._upload(values), non_blocking=True)
