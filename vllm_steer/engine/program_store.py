# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the books: what each running request's program occupies in the device tables.

Everything is uploaded once: a vector when the first request that uses it is admitted, a row likewise, a request's
segments when it joins. What requests change between two steps goes up together; a step in which none comes or goes
uploads nothing here. All writes are enqueued on the stream on which the model runs, so a step that is still in flight
never sees a later one's tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_steer.config import SteeringConfig
from vllm_steer.engine.pinned_writer import PinnedTableWriter
from vllm_steer.params import program_bytes
from vllm_steer.program import Instruction, PlacedProgram, Program, Resolved, RowFormat, TableAllocator, resolve
from vllm_steer.program.instructions import CAPTURE
from vllm_steer.taps.tables import OPEN_END, Tables


@dataclass
class _Bound:
    """A program's segments in the tables: requests with equal programs and prompts of one length share them, so that of
    many only the first takes places. ``starts`` and ``rows`` are int32 ``[max_segments]``."""

    resolved: Resolved
    starts: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]
    users: int = 0


@dataclass(frozen=True)
class _Running:
    slot: int
    bound: _Bound


@dataclass
class _Directions:
    """A projection that running requests use: the digests of its directions, and these on the device."""

    digests: tuple[bytes, ...]
    users: int = 0
    gathered: torch.Tensor | None = None


class Spans:
    """For each slot a span of positions, ``[low, high)``, empty where there is none; host-side, for a whole batch at
    once."""

    def __init__(self, num_slots: int) -> None:
        self._low = np.full(num_slots, OPEN_END, dtype=np.int64)
        self._high = np.zeros(num_slots, dtype=np.int64)

    def set(self, slot: int, low: int, high: int) -> None:
        self._low[slot], self._high[slot] = low, high

    def clear(self, slot: int) -> None:
        self.set(slot, OPEN_END, 0)

    def meets(
        self, slot: npt.NDArray[np.int64], first: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Whether the positions ``first`` up to ``stop`` of the requests in these slots touch their spans."""
        meets: npt.NDArray[np.bool_] = (stop > self._low[slot]) & (first < self._high[slot])
        return meets


def _projected(resolved: Resolved) -> list[RowFormat]:
    """The forms in which rows leave projected, each projection once."""
    forms = {form.projection: form for row in resolved.token_programs for form in row.row_formats if form.directions}
    return list(forms.values())


class ProgramStore:
    """Places programs in :class:`Tables`; refuses nothing, since the scheduler's ledger admitted all it is given."""

    def __init__(self, tables: Tables, config: SteeringConfig, num_layers: int, own: range | None = None) -> None:
        self.tables = tables
        self._num_layers = num_layers
        # Where one stage has all layers, what the scheduler has resolved is what this stage would.
        self._own = None if own == range(num_layers) else own
        self._max_segments = config.max_segments
        self._ledger = TableAllocator(config.max_rows, config.max_instructions, config.max_vectors)
        self._running: dict[str, _Running] = {}
        self._bound: dict[int, _Bound] = {}
        self._directions: dict[bytes, _Directions] = {}
        self._capturing = 0
        num_slots = tables.segment_start.shape[0]
        # Where a request's tokens have a row at all, and where that row reads: by slot.
        self.active, self.reads = Spans(num_slots), Spans(num_slots)
        # Where the last segment of a request begins: by slot.
        self.last_segment = np.zeros(num_slots, dtype=np.int64)
        # Changes whenever the sites in use may have changed, and whenever a request came or went.
        self.version = self.changes = self._flushed = 0
        self._no_rows = np.zeros(self._max_segments, dtype=np.int32)
        self._staged = tuple(
            PinnedTableWriter(table)
            for table in (
                tables.vector,
                tables.instruction,
                tables.parameter,
                tables.head,
                tables.row_captures,
                tables.segment_start,
                tables.segment_row,
            )
        )
        (
            self._vector,
            self._instruction,
            self._parameter,
            self._head,
            self._row_captures,
            self._segment_start,
            self._segment_row,
        ) = self._staged

    @property
    def num_steered(self) -> int:
        """Requests in the engine whose tokens may take a row other than 0."""
        return len(self._running)

    @property
    def num_capturing(self) -> int:
        """Requests in the engine some of whose tokens store rows."""
        return self._capturing

    def resolved_of(self, request_id: str) -> Resolved:
        """The program of a request that holds a slot."""
        return self._running[request_id].bound.resolved

    def slot_of(self, request_id: str) -> int | None:
        running = self._running.get(request_id)
        return None if running is None else running.slot

    def add(self, request_id: str, slot: int, sampling_params: Any, prompt_len: int) -> bool:
        """Bind a request to ``slot`` of the segment tables; False where it asks for no edit and needs no slot."""
        data = program_bytes(sampling_params)
        if data is None:
            return False
        program = Program.from_trusted_bytes(data)
        resolved = resolve(program, prompt_len, self._num_layers, self._own)
        if not resolved.token_programs:
            return False
        bound = self._bound.get(id(resolved))
        if bound is None:
            bound = self._bound[id(resolved)] = self._place(resolved, program)
        bound.users += 1
        self._segment_start.put(slot, bound.starts)
        self._segment_row.put(slot, bound.rows)
        self._running[request_id] = _Running(slot, bound)
        self._capturing += resolved.max_captures > 0
        self.changes += 1
        self.active.set(slot, *resolved.active_range)
        self.reads.set(slot, *resolved.read_range)
        self.last_segment[slot] = resolved.segments[-1].start
        return True

    def remove(self, request_id: str) -> int | None:
        """Forget a request; its slot takes row 0 from now on. Returns the slot, or None where it held none."""
        running = self._running.pop(request_id, None)
        if running is None:
            return None
        bound = running.bound
        self._capturing -= bound.resolved.max_captures > 0
        bound.users -= 1
        if not bound.users:
            self._displace(bound.resolved)
        self.active.clear(running.slot)
        self.reads.clear(running.slot)
        self.last_segment[running.slot] = 0
        self.changes += 1
        self._segment_row.put(running.slot, self._no_rows)
        return running.slot

    def directions(self, projection: bytes) -> torch.Tensor:
        """The directions ``[k, hidden]`` float32, on the device, of a projection that a running request uses.

        They are gathered once from the pool of vectors, on the current stream: the forward pass's, on which they were
        written.
        """
        held = self._directions[projection]
        if held.gathered is None:
            places = torch.tensor([self._ledger.vector_slot(digest) for digest in held.digests])
            if self.tables.device.type == "cuda":
                places = places.pin_memory().to(self.tables.device, non_blocking=True)
            held.gathered = self.tables.vector.index_select(0, places)
        return held.gathered

    def flush(self) -> None:
        """Before a step: write to the tables what has changed since the last one."""
        if self._flushed == self.changes:
            return
        self._flushed = self.changes
        self._head.put(0, np.array(self.tables.site_users, dtype=np.int32))
        for staged in self._staged:
            staged.flush()

    def _place(self, resolved: Resolved, program: Program) -> _Bound:
        """Take places for a program, and write to them."""
        new_rows, new_vectors = self._ledger.acquire(resolved.token_programs)
        for digest, place in new_vectors.items():
            self._vector.put(place, program.vector(program.by_digest[digest]))
        for placed in new_rows:
            self._put_row(placed)
        for form in _projected(resolved):
            self._directions.setdefault(form.projection, _Directions(form.directions)).users += 1
        starts, rows = np.full(self._max_segments, OPEN_END, dtype=np.int32), self._no_rows.copy()
        for i, segment in enumerate(resolved.segments):
            starts[i] = segment.start
            rows[i] = self._ledger.row_of(segment.program)
        return _Bound(resolved, starts, rows)

    def _displace(self, resolved: Resolved) -> None:
        """Give a program's places back."""
        del self._bound[id(resolved)]
        for form in _projected(resolved):
            held = self._directions[form.projection]
            held.users -= 1
            if not held.users:
                del self._directions[form.projection]
        for row in resolved.token_programs:
            self._ledger.release([row])
            if not self._ledger.holds(row):
                self._count_users(row.instructions, -1)

    def _put_row(self, placed: PlacedProgram) -> None:
        heads = np.zeros(self.tables.num_sites, dtype=np.int32)
        following: dict[int, int] = {}
        pairs = list(zip(placed.instruction_slots, placed.program.instructions, strict=True))
        # From the last to the first: each then knows the one that comes after it at its site.
        for place, each in reversed(pairs):
            self._instruction.put(place, (each.code, self._argument(each), following.get(each.site, 0), 0))
            self._parameter.put(place, (each.strength, each.low, each.high, 0.0))
            heads[self.tables.column[each.site]] = following[each.site] = place
        self._head.put(placed.row, heads)
        self._row_captures.put(placed.row, len(placed.program.captures))
        self._count_users(placed.program.instructions, 1)

    def _argument(self, instruction: Instruction) -> int:
        if instruction.code == CAPTURE:
            return instruction.index
        return self._ledger.vector_slot(instruction.vector)

    def _count_users(self, instructions: Any, change: int) -> None:
        for site in {instruction.site for instruction in instructions}:
            self.tables.site_users[self.tables.column[site]] += change
        self.version += 1
