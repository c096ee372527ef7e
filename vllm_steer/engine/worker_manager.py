# SPDX-License-Identifier: Apache-2.0
"""Steering of one engine rank: what happens before and after each forward pass.

Both model runners describe their batch as a :class:`~vllm_steer.engine.step_batch.StepBatch`; nothing here depends on
the runner in use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import numpy as np
import numpy.typing as npt
import torch

from vllm_steer.engine.cudagraph_sets import CUDAGraphSetManager
from vllm_steer.engine.device_to_host import DeviceToHostCopier, PendingRows
from vllm_steer.engine.head_readouts import HeadReadouts
from vllm_steer.engine.program_store import ProgramStore
from vllm_steer.engine.record_copy import RecordCopy
from vllm_steer.engine.record_keeper import replays_of
from vllm_steer.engine.row_capture import RowCapture
from vllm_steer.engine.step_batch import StepBatch
from vllm_steer.metrics.engine_stats import WorkerStats
from vllm_steer.models.discovery import Decoder
from vllm_steer.taps.assignment import BatchLayout, clear_rows
from vllm_steer.taps.heads import Head
from vllm_steer.taps.ops import DeviceOps
from vllm_steer.taps.records import accepted_tokens, committed_state, wrong_drafts

P = ParamSpec("P")


def _timed(
    method: Callable[Concatenate[WorkerSteeringManager, P], None],
) -> Callable[Concatenate[WorkerSteeringManager, P], None]:
    """Add the duration of each call to the step's host time."""

    @wraps(method)
    def timed(self: WorkerSteeringManager, /, *args: P.args, **kwargs: P.kwargs) -> None:
        started = time.perf_counter()
        method(self, *args, **kwargs)
        self._seconds += time.perf_counter() - started

    return timed


@dataclass(frozen=True)
class SavedState:
    """Contents of a rank's device memory while it sleeps, in host memory."""

    tables: Mapping[str, torch.Tensor]
    allocated: Sequence[torch.Tensor]


class WorkerSteeringManager:
    """Steering of one engine rank, owned by the model runner.

    Args:
        decoder: The model's decoder layers on this rank.
        store: Programs of the running requests and the device tables.
        graph_sets: CUDA graphs of the model.
        ops: Functions for the rank's device.
        facts: What this rank serves, in builtin types.
        heads: Heads of readouts by the names that programs use.
        no_lens: Why readouts of the kind ``lens`` are refused, or None.
        captures: Whether this rank returns captured rows.
        speculative: Whether the engine decodes speculatively.
        compare_plain_code: Whether the self-check compares steps with and without taps; equal on all ranks.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: ProgramStore,
        graph_sets: CUDAGraphSetManager,
        ops: DeviceOps,
        facts: Mapping[str, Any],
        *,
        heads: Mapping[str, Head],
        no_lens: str | None,
        captures: bool,
        speculative: bool,
        compare_plain_code: bool,
    ) -> None:
        self.decoder = decoder
        self.tables = store.tables
        self.store = store
        self.graph_sets = graph_sets
        self.compare_plain_code = compare_plain_code
        self.self_check: dict[str, Any] = {"ran": False, "reason": "the engine is still starting"}
        self._copier = DeviceToHostCopier(store.tables.device, ops.products_at)
        self.capture = RowCapture(store, self._copier, enabled=captures, speculative=speculative)
        self.heads = HeadReadouts(store, heads, ops, enabled=captures, speculative=speculative)
        self.no_lens = no_lens
        self.records = RecordCopy(store, self._copier, enabled=captures, speculative=speculative)
        self._recorded: BatchLayout | None = None
        # Drafts of the last step that were computed with wrong factors, by request.
        self._wrong: torch.Tensor | None = None
        # Tokens whose replay flag on the device may not be 0.
        self._num_replayed = 0
        self._ops = ops
        self._facts = facts
        self._speculative = speculative
        # Tokens whose row on the device may not be 0.
        self._num_assigned = 0
        # Key of the row assignment on the device, which is valid for steps with an equal key; None if for none.
        self._assigned: Hashable = None
        self.hooks = self.tables.hooks
        # Whether the arena offsets on the device belong to the current assignment.
        self._offsets_assigned = False
        self._seconds = 0.0
        self._worked = False
        # Tensors beside the tables that are allocated while the model is loaded; runners append theirs.
        self.allocated = [tensor for head in heads.values() for tensor in head.tensors]

    @property
    def num_bytes(self) -> int:
        """Size on the device of the tables and heads."""
        return self.tables.num_bytes + sum(head.num_bytes for head in self.heads.heads.values())

    @property
    def active(self) -> bool:
        """Whether any request is steered or captured. If not, a runner need not describe its batch."""
        return self.store.num_with_program > 0

    def save(self) -> SavedState:
        """Return copies in host memory of all that was allocated with the model, for sleep level 2."""
        return SavedState(self.tables.save(), [tensor.to("cpu", copy=True) for tensor in self.allocated])

    def restore(self, saved: SavedState) -> None:
        """Restore the contents that :meth:`save` returned, in place."""
        self.tables.restore(saved.tables)
        for tensor, contents in zip(self.allocated, saved.allocated, strict=True):
            tensor.copy_(contents)

    def begin(self, describe: Callable[[], StepBatch]) -> None:
        """Prepare the forward pass of a real step; ``describe`` is called if a request or a user hook needs it."""
        if self.active:
            self.begin_step(describe())
        else:
            self.begin_idle_step()
        if self.hooks is not None and self.hooks.registered:
            batch = describe()
            self.hooks.begin(batch.ids, batch.first.tolist(), batch.count.tolist())

    @_timed
    def begin_step(self, batch: StepBatch) -> None:
        """Prepare the forward pass of a real step while :attr:`active`."""
        self._worked = True
        store = self.store
        store.flush()
        # With draft tokens in flight, the host's first position is an upper bound only.
        first = np.zeros_like(batch.first) if self._speculative else batch.first
        stop = batch.first + batch.count
        in_last_segments = not self._speculative and bool((first >= store.last_segment[batch.request_slot]).all())
        if not self._keeps_rows(batch, in_last_segments=in_last_segments):
            if not store.active_ranges.overlap(batch.request_slot, first, stop).any():
                self.begin_idle_step()
                if store.num_recorded:
                    # Tokens without edits have records too, which are written outside the model.
                    self._begin_records(batch, first, stop)
                return
            if self._num_assigned > batch.num_padded:
                clear_rows(self.tables, self._num_assigned)
            self._assign_rows(batch.layout(), batch.num_padded)
            self._num_assigned = batch.num_padded
            self._offsets_assigned = False
        self.graph_sets.select(self.tables.site_users, store.version)
        if store.num_recorded:
            self._begin_records(batch, first, stop)
        if not store.num_capturing:
            return
        capturing = np.flatnonzero(store.captured_ranges.overlap(batch.request_slot, first, stop))
        if len(capturing):
            if not self._offsets_assigned:
                self._ops.assign_arena_offsets(self.tables, int(batch.count.sum()))
                self._offsets_assigned = True
            self.capture.plan(batch, capturing)
            self.heads.plan(batch, capturing)

    def _keeps_rows(self, batch: StepBatch, *, in_last_segments: bool) -> bool:
        """Return whether the last row assignment is valid for this step. If not, the caller assigns rows for this step.

        When every request of a decoding batch has reached its last segment, the batch takes the same rows in every
        step. They then depend only on the programs in the tables, the place of each request in the batch, and the
        number of its tokens.
        """
        before, self._assigned = self._assigned, None
        if in_last_segments:
            slots, count = batch.request_slot.tobytes(), batch.count.tobytes()
            self._assigned = self.store.changes, batch.num_padded, slots, count
        return self._assigned is not None and self._assigned == before

    def _begin_records(self, batch: StepBatch, first: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]) -> None:
        store = self.store
        store.next_step[batch.request_slot] = stop
        if self._num_replayed:
            self.tables.replayed[: self._num_replayed].zero_()
            self._num_replayed = 0
        if store.replays:
            self._replay_records(batch, stop)
        if store.has_state:
            self._recorded = batch.layout()
            self._ops.begin_records(self.tables, self._recorded, store.num_conditions)
        recorded = np.flatnonzero(store.record_ranges.overlap(batch.request_slot, first, stop))
        if len(recorded):
            self.records.plan(batch, recorded)

    def _replay_records(self, batch: StepBatch, stop: npt.NDArray[np.int64]) -> None:
        """Write the records of tokens that are computed again. A resumed request has no drafts until all have been."""
        tokens = np.cumsum(batch.count) - batch.count
        ids = list(batch.ids)
        for request_id, (replay, records) in list(self.store.replays.items()):
            if request_id not in ids:
                continue
            index = ids.index(request_id)
            start, end = max(int(batch.first[index]), replay.start), min(int(stop[index]), replay.stop)
            if batch.first[index] >= replay.stop:
                del self.store.replays[request_id]
            elif start < end:
                token = int(tokens[index] + start - batch.first[index])
                width = min(records.shape[1], self.tables.record.shape[1])
                rows = records[start - replay.start : end - replay.start, :width]
                self.tables.record[token : token + end - start, :width] = rows
                self.tables.replayed[token : token + end - start] = 1
                self._num_replayed = max(self._num_replayed, token + end - start)

    def receive_replays(self, scheduled: Any) -> None:
        """Take the records of resumed requests from a scheduler output, after its requests have been added."""
        for request_id, replay in replays_of(scheduled).items():
            self.store.set_replay(request_id, replay)

    def _assign_rows(self, layout: BatchLayout, num_padded: int) -> None:
        self._ops.assign_rows(self.tables, layout, num_padded)

    def begin_idle_step(self) -> None:
        """Prepare a forward pass without steered or captured requests: a plain step, a dummy or a capture run."""
        self.store.flush()
        self._assigned = None
        if self._num_assigned:
            clear_rows(self.tables, self._num_assigned)
            self._num_assigned = 0
        self.graph_sets.select_idle()

    def end_step(self) -> None:
        """Restore the model, fold records and start copying rows, after the forward pass and on the same stream."""
        self.graph_sets.restore_model()
        if self.hooks is not None:
            self.hooks.end()
        self._start_copy()

    @_timed
    def _start_copy(self) -> None:
        self.capture.start_copy()
        self.heads.run()
        self._wrong = None
        if self._recorded is not None:
            self._fold_records(self._recorded)
            self._recorded = None
        if not self.heads.waiting:
            self.records.start_copy()

    def finish_readouts(self) -> None:
        """Start copying the records, if they waited for the logits of the step."""
        self.records.start_copy()

    def _fold_records(self, layout: BatchLayout) -> None:
        conditions = self.store.num_conditions
        feeds_back = self._speculative and self.store.feeds_back
        before = committed_state(self.tables, layout) if feeds_back else None
        self._ops.fold_records(self.tables, layout, conditions)
        if before is not None:
            self._wrong = wrong_drafts(self.tables, layout, before, conditions)

    def accepted_tokens(self, num_drafts: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Return how many tokens sampled in the last step each request can keep; None if all.

        Args:
            num_drafts: Returns the number of draft tokens of each request of the step, on the device.
        """
        return None if self._wrong is None else accepted_tokens(self._wrong, num_drafts())

    def take_rows(self) -> tuple[PendingRows, ...]:
        """Return the captured rows and the records of the last step, once."""
        return (*self.capture.take_rows(), *self.records.take_rows())

    def take_stats(self) -> WorkerStats | None:
        """Return the statistics of the last step, once; None if no request was steered or captured."""
        if not self._worked:
            return None
        seconds, self._seconds = self._seconds, 0.0
        self._worked = False
        return WorkerStats(seconds, self._copier.num_bytes)

    def capabilities(self) -> dict[str, Any]:
        """Return what this rank serves, in builtin types: vLLM sends it to the front end as an RPC result."""
        tables = {name: value.nbytes for name, value in self.tables.named_tensors()}
        tables.update((name, head.num_bytes) for name, head in self.heads.heads.items() if head.num_bytes)
        no_plain_code = self.graph_sets.no_plain_code
        return {
            **self._facts,
            "tables": tables,
            "self_check": self.self_check,
            "no_plain_code": no_plain_code,
            "no_lens": self.no_lens,
            "heads": {name: head.num_outputs for name, head in self.heads.heads.items()},
        }
