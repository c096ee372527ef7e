# SPDX-License-Identifier: Apache-2.0
"""Programs of running requests in the device tables of a worker.

A vector or a table row is uploaded when the first request that uses it starts, and a request's segments when it starts.
The changes between two steps are uploaded together; a step in which no request starts or ends uploads nothing. All
writes are enqueued on the model's stream, so a step in flight never sees the tables of a later one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_steer.config import SteeringConfig
from vllm_steer.engine.live_strengths import LiveStrengths
from vllm_steer.engine.operand_runs import OperandRuns
from vllm_steer.engine.pinned_writer import PinnedTableWriter, flush_writers
from vllm_steer.engine.record_keeper import Replay
from vllm_steer.engine.request_ranges import RequestRanges
from vllm_steer.params import live_id, program_bytes
from vllm_steer.program import (
    Instruction,
    PlacedTokenProgram,
    Program,
    Resolved,
    RowFormat,
    TableAllocator,
    TokenProgram,
    resolve,
)
from vllm_steer.program.instructions import CAPTURE, GATE, REPLACE_AT
from vllm_steer.program.position_runs import NO_RUN
from vllm_steer.program.records import BOUND_FIELDS, CONDITION_FIELDS, STOP_COLUMN, RequestRecords
from vllm_steer.program.token_program import MlpRead
from vllm_steer.taps.mlp_head import MlpHead
from vllm_steer.taps.records import state_after
from vllm_steer.taps.tables import OPEN_END, Tables, upload

_STAGED = (
    "vector", "instruction", "parameter", "head", "row_captures", "segment_start", "segment_row", "initial",
    "condition", "bound", "carry", "next_position",
)  # fmt: skip
"""Tables that are written between steps."""


@dataclass
class _PlacedSegments:
    """Segments of a program in the tables, shared by requests with equal programs and prompt lengths.

    ``starts`` and ``rows`` are int32 ``[max_segments]``.
    """

    resolved: Resolved
    starts: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]
    users: int = 0


@dataclass(frozen=True)
class _Running:
    request_slot: int
    segments: _PlacedSegments


@dataclass
class _Directions:
    """Directions of a projection that running requests use, and their tensor on the device."""

    digests: tuple[bytes, ...]
    users: int = 0
    gathered: torch.Tensor | None = None


def _run_key(program: TokenProgram, number: int) -> bytes:
    return program.digest + number.to_bytes(4, "little")


def _projections(resolved: Resolved) -> list[RowFormat]:
    """Return the row formats with a projection, each projection once."""
    forms = {form.projection: form for row in resolved.token_programs for form in row.row_formats if form.directions}
    return list(forms.values())


class ProgramStore:
    """Programs of running requests, placed in :class:`Tables`. The scheduler only sends requests that fit."""

    def __init__(self, tables: Tables, config: SteeringConfig, num_layers: int, own: range | None = None) -> None:
        self.tables = tables
        self._num_layers = num_layers
        # A stage with all layers resolves programs like the scheduler and shares its cache.
        self._own = None if own == range(num_layers) else own
        self._max_segments = config.max_segments
        self._allocator = TableAllocator(
            config.max_rows, config.max_instructions, config.max_vectors, config.max_matrix_rows
        )
        self._running: dict[str, _Running] = {}
        self._placed: dict[int, _PlacedSegments] = {}
        self._directions: dict[bytes, _Directions] = {}
        # Running requests that capture, and those with readouts that a head computes.
        self.num_capturing = self.num_with_heads = 0
        # Records of running requests, by request id, and how many of them have each width, number of conditions, and
        # values of `has_state` and `feeds_back`.
        self._recorded: dict[str, RequestRecords] = {}
        self._record_kinds: Counter[tuple[int, int, bool, bool]] = Counter()
        self._live = LiveStrengths()
        # Largest record, in columns, most conditions, and whether any request has state, over running requests.
        self.record_width = self.num_conditions = 0
        self.has_state = False
        # Whether readouts of generated tokens decide about later ones.
        self.feeds_back = False
        # Records of resumed requests, on the host and on the device, until they have been computed again.
        self.replays: dict[str, tuple[Replay, torch.Tensor]] = {}
        num_slots = tables.segment_start.shape[0]
        # By request slot: the positions that are steered or captured, and those that are captured, and those
        # whose records leave the device.
        self.active_ranges, self.captured_ranges = RequestRanges(num_slots), RequestRanges(num_slots)
        self.record_ranges = RequestRanges(num_slots)
        # By request slot: the first position of the next step, while any request has records.
        self.next_step = np.zeros(num_slots, dtype=np.int64)
        # By request slot: the start of the last segment, and its program.
        self.last_segment = np.zeros(num_slots, dtype=np.int64)
        self.last_program = np.full(num_slots, None)
        self._head_index = np.array(tables.head_index)
        # Incremented when the sites in use may have changed, and when a request starts or ends.
        self.version = self.changes = self._flushed = 0
        self._no_rows = np.zeros(self._max_segments, dtype=np.int32)
        self._no_conditions = np.zeros(tables.condition.shape[1:], dtype=np.int32)
        self._initial = np.ones(tables.initial.shape[1], dtype=np.float32)
        self._initial[STOP_COLUMN] = 0.0
        self._staged = {name: PinnedTableWriter(getattr(tables, name)) for name in _STAGED}
        self._operands = OperandRuns(tables.operand)
        # Rows with runs of operands, by the digest of their token program.
        self._with_runs: dict[bytes, PlacedTokenProgram] = {}

    @property
    def num_with_program(self) -> int:
        """Number of running requests that are steered or captured."""
        return len(self._running)

    @property
    def num_recorded(self) -> int:
        """Number of running requests whose tokens have records."""
        return len(self._recorded)

    def resolved_of(self, request_id: str) -> Resolved:
        """Return the resolved program of a request that has a request slot."""
        return self._running[request_id].segments.resolved

    def slot_of(self, request_id: str) -> int | None:
        running = self._running.get(request_id)
        return None if running is None else running.request_slot

    def add(self, request_id: str, request_slot: int, sampling_params: Any, prompt_len: int) -> bool:
        """Place the program of a request and return True, or return False if it has none and needs no request slot."""
        data = program_bytes(sampling_params)
        if data is None:
            return False
        program = Program.from_trusted_bytes(data)
        resolved = resolve(program, prompt_len, self._num_layers, self._own)
        if not resolved.token_programs:
            return False
        placed = self._placed.get(id(resolved))
        if placed is None:
            placed = self._placed[id(resolved)] = self._place(resolved, program)
        placed.users += 1
        self._put("segment_start", request_slot, placed.starts)
        self._put("segment_row", request_slot, placed.rows)
        self._running[request_id] = _Running(request_slot, placed)
        self.num_capturing += resolved.max_captures > 0
        self.num_with_heads += resolved.has_heads
        self.changes += 1
        self.active_ranges.set(request_slot, *resolved.active_range)
        self.captured_ranges.set(request_slot, *resolved.captured_range)
        last = resolved.segments[-1]
        self.last_segment[request_slot], self.last_program[request_slot] = last.start, last.program
        if resolved.records is not None:
            if resolved.records.layout.live:
                self._live.begin(request_id, live_id(sampling_params, request_id), prompt_len)
            self._add_records(request_id, request_slot, resolved.records)
        return True

    def _add_records(self, request_id: str, slot: int, records: RequestRecords) -> None:
        """Write the conditions and the initial state of a request that has records."""
        self._recorded[request_id] = records
        self.record_ranges.set(slot, records.record_start, records.record_stop)
        self._put_initial(request_id, slot, records)
        self.next_step[slot] = 0
        self._count_records(records, 1)
        if not records.conditions:
            return
        _, drafts, width = self.tables.carry.shape
        condition = np.zeros((width, CONDITION_FIELDS), dtype=np.int32)
        bound = np.zeros((width, BOUND_FIELDS), dtype=np.float32)
        carry = np.zeros((drafts, width), dtype=np.float64)
        for c, each in enumerate(records.conditions):
            condition[c], bound[c], carry[:, c] = each.fields, each.numbers, each.initial_state
        self._put("condition", slot, condition)
        self._put("bound", slot, bound)
        self._put("carry", slot, carry)
        self._put("next_position", slot, np.zeros((), dtype=np.int64))

    def set_strengths(self, live: str, strengths: Mapping[str, float]) -> int:
        """Set live strengths of a request from its next step on, or from the end of its prompt if it is within it.

        Args:
            live: The request's live id.
            strengths: New factors by name.

        Returns:
            The first position that has them, 0 if the request has had no step; -1 if it has ended.
        """
        request_id = self._live.request_id(live) or ""
        slot = self.slot_of(request_id)
        if slot is None or request_id not in self._recorded:
            return self._live.set(live, strengths, None)
        position = self._live.set(live, strengths, self._new_position(request_id, slot))
        if request_id not in self._live.delayed:
            self._put_initial(request_id, slot, self._recorded[request_id])
            self.changes += 1
        return position

    def _end_delays(self) -> None:
        """Put strengths in force that were set within a prompt that has been computed."""
        for request_id in list(self._live.delayed):
            slot = self.slot_of(request_id)
            if slot is not None and self._live.end_delay(request_id, self._new_position(request_id, slot)):
                self._put_initial(request_id, slot, self._recorded[request_id])
                self.changes += 1

    def _new_position(self, request_id: str, slot: int) -> int:
        """Return the first position that a request has not computed; a resumed one computes earlier ones again.

        These tokens keep the strengths that they had.
        """
        replay = self.replays.get(request_id)
        return int(self.next_step[slot]) if replay is None else max(int(self.next_step[slot]), replay[0].stop)

    def forget_strengths(self, request_ids: Iterable[str]) -> None:
        """Forget the live strengths of requests that have ended, before requests with the same ids are added."""
        self._live.end(request_ids)

    def _put_initial(self, request_id: str, slot: int, records: RequestRecords) -> None:
        initial = self._initial.copy()
        for name, value in self._live.of(request_id).items():
            if name in records.layout.live:
                initial[records.layout.live[name]] = value
        self._put("initial", slot, initial)

    def set_replay(self, request_id: str, replay: Replay) -> None:
        """Give a resumed request, which has just been added, its records back."""
        own, slot = self._recorded.get(request_id), self.slot_of(request_id)
        if own is None or slot is None:
            return
        _, drafts, width = self.tables.carry.shape
        carry = np.zeros((drafts, width), dtype=np.float64)
        carry[:, : len(own.conditions)] = state_after(
            own.conditions, replay.records, replay.start, replay.generated, replay.prompt_len
        )
        self._put("carry", slot, carry)
        self.replays[request_id] = (replay, upload(torch.from_numpy(replay.records), self.tables.device))

    def _count_records(self, records: RequestRecords, change: int) -> None:
        kinds = self._record_kinds
        kind = records.layout.width, len(records.conditions), records.has_state, records.feeds_back
        kinds[kind] += change
        if not kinds[kind]:
            del kinds[kind]
        self.tables.num_recorded = len(self._recorded)
        largest = tuple(map(max, zip(*kinds, strict=True))) or (0, 0, False, False)
        self.record_width, self.num_conditions, self.has_state, self.feeds_back = largest

    def remove(self, request_id: str) -> int | None:
        """Remove a request, reset its request slot to row 0, and return the slot, or None if it had none."""
        running = self._running.pop(request_id, None)
        if running is None:
            return None
        placed = running.segments
        if (records := self._recorded.pop(request_id, None)) is not None:
            if records.layout.live:
                self._live.pause(request_id, self._new_position(request_id, running.request_slot))
            if records.conditions:
                # Plain requests may get the slot, or share it.
                self._put("condition", running.request_slot, self._no_conditions)
            self.replays.pop(request_id, None)
            self.record_ranges.clear(running.request_slot)
            self._count_records(records, -1)
        self.num_capturing -= placed.resolved.max_captures > 0
        self.num_with_heads -= placed.resolved.has_heads
        placed.users -= 1
        if not placed.users:
            self._release(placed.resolved)
        self.active_ranges.clear(running.request_slot)
        self.captured_ranges.clear(running.request_slot)
        self.last_segment[running.request_slot], self.last_program[running.request_slot] = 0, None
        self.changes += 1
        self._put("segment_row", running.request_slot, self._no_rows)
        return running.request_slot

    def directions(self, projection: bytes) -> torch.Tensor:
        """Return the directions of a projection of a running request, float32 ``[k, hidden]`` on the device.

        They are gathered once from the vector table, on the current stream. That is the model's stream, on which they
        were written.
        """
        held = self._directions[projection]
        if held.gathered is None:
            held.gathered = self._gather(held.digests)
        return held.gathered

    def mlp_head(self, mlp: MlpRead) -> MlpHead:
        """Return a probe with a hidden layer of a running request, on the device."""
        weights = self._gather(mlp.vectors)
        return MlpHead(weights, mlp.biases, mlp.outputs, mlp.bias, mlp.activation, sigmoid=mlp.sigmoid)

    def _gather(self, digests: Sequence[bytes]) -> torch.Tensor:
        indices = torch.tensor([self._allocator.vector_index(digest) for digest in digests])
        return self.tables.vector.index_select(0, upload(indices, self.tables.device))

    def flush(self) -> None:
        """Write the changes since the last step to the tables."""
        if self._live.delayed:
            self._end_delays()
        if self._flushed == self.changes:
            return
        self._flushed = self.changes
        users = np.zeros(self.tables.head.shape[1], dtype=np.int32)
        users[self._head_index] = self.tables.site_users
        self._put("head", 0, users)
        flush_writers(self._staged.values())
        self._operands.flush()

    def _put(self, table: str, row: int, value: Any) -> None:
        self._staged[table].put(row, value)

    def _place(self, resolved: Resolved, program: Program) -> _PlacedSegments:
        """Reserve table entries for a program and write them."""
        new_rows, new_vectors = self._allocator.acquire(resolved.token_programs)
        for digest, index in new_vectors.items():
            self._put("vector", index, program.vector(program.by_digest[digest]))
        for placed in new_rows:
            self._put_row(placed)
        for form in _projections(resolved):
            self._directions.setdefault(form.projection, _Directions(form.directions)).users += 1
        starts, rows = np.full(self._max_segments, OPEN_END, dtype=np.int32), self._no_rows.copy()
        for i, segment in enumerate(resolved.segments):
            starts[i] = segment.start
            rows[i] = self._allocator.row_of(segment.program)
        return _PlacedSegments(resolved, starts, rows)

    def _release(self, resolved: Resolved) -> None:
        """Release the table entries of a program."""
        del self._placed[id(resolved)]
        for form in _projections(resolved):
            held = self._directions[form.projection]
            held.users -= 1
            if not held.users:
                del self._directions[form.projection]
        for row in resolved.token_programs:
            self._allocator.release([row])
            if not self._allocator.holds(row):
                self._count_users(row.instructions, -1)
                if self._with_runs.pop(row.digest, None) is not None:
                    for number in range(len(row.runs)):
                        self._operands.remove(_run_key(row, number))

    def _put_runs(self, placed: PlacedTokenProgram) -> None:
        """Write the operands of a row, and the instructions of other rows whose operands have moved."""
        program = placed.program
        index_of = self._allocator.vector_indices(program.vectors)
        moved = False
        for number, run in enumerate(program.runs):
            moved |= self._operands.add(_run_key(program, number), run.operands(index_of))
        if moved:
            for other in self._with_runs.values():
                self._put_parameters(other)
        self._with_runs[program.digest] = placed

    def _put_parameters(self, placed: PlacedTokenProgram) -> None:
        for index, each in zip(placed.instruction_indices, placed.program.instructions, strict=True):
            # float32 holds all places of operands exactly, since max_matrix_rows is at most 2^24.
            first = 0 if each.run == NO_RUN else self._operands.start_of(_run_key(placed.program, each.run))
            self._put("parameter", index, (each.strength, each.low, each.high, float(first)))

    def _put_row(self, placed: PlacedTokenProgram) -> None:
        if placed.program.runs:
            self._put_runs(placed)
        self._put_parameters(placed)
        heads = np.zeros(self.tables.head.shape[1], dtype=np.int32)
        following: dict[int, int] = {}
        pairs = list(zip(placed.instruction_indices, placed.program.instructions, strict=True))
        # In reverse order, because each instruction refers to the next one at its site.
        for index, each in reversed(pairs):
            columns = 0 if each.code == CAPTURE else each.index
            self._put(
                "instruction", index, (each.code, self._argument(each), following.get(each.site_number, 0), columns)
            )
            column = self.tables.head_index[self.tables.column[each.site_number]]
            heads[column] = following[each.site_number] = index
        self._put("head", placed.row, heads)
        self._put("row_captures", placed.row, len(placed.program.captures))
        self._count_users(placed.program.instructions, 1)

    def _argument(self, instruction: Instruction) -> int:
        if instruction.code == CAPTURE:
            return instruction.index
        if instruction.code in (GATE, REPLACE_AT):
            return 0
        return self._allocator.vector_index(instruction.vector)

    def _count_users(self, instructions: Any, change: int) -> None:
        for site_number in {instruction.site_number for instruction in instructions}:
            self.tables.site_users[self.tables.column[site_number]] += change
        self.version += 1
