# SPDX-License-Identifier: Apache-2.0
"""Front-end buffer of captured rows: steps are kept as they arrive and split by request only when needed.

While a batch decodes, nothing runs per request. A request's rows are split off when it finishes, when it streams rows,
or when the buffer exceeds :data:`MAX_BYTES` or :data:`MAX_STEPS`; these limits also bound how many of its neighbours'
rows a long request keeps alive. Small rows are first merged for all requests at once
(:func:`~vllm_steer.capture.step_rows.merge_steps`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_steer.capture.row_assembler import RowAssembler, RowChunk
from vllm_steer.capture.row_payload import RECORDS, ROWS_REQUEST_ID, decode_missing_reason, decode_step
from vllm_steer.capture.step_rows import StepRows, merge_steps

MAX_BYTES = 32 << 20
MAX_STEPS = 64
_SHARED_BYTES = 1 << 16
"""Size above which the rows of a request may be a view of their step."""


@dataclass
class _Run:
    """Rows of one request at consecutive positions."""

    codes: tuple[int, ...]
    projection: bytes
    start: int
    stop: int
    parts: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    others: int = 0
    """Bytes of other rows in the last part's step."""

    def joined(self) -> npt.NDArray[np.uint8]:
        """Return the rows: a copy, unless they are large and more than half of their step."""
        if len(self.parts) == 1 and self.parts[0].nbytes > max(self.others, _SHARED_BYTES):
            return self.parts[0]
        return np.concatenate(self.parts)


class RowReceiver:
    """Receiver of captured rows for one front end."""

    def __init__(
        self, on_size: Callable[[int], None] = lambda num_bytes: None, *, max_steps: int | None = None
    ) -> None:
        """Create an empty receiver.

        Args:
            on_size: Called with the number of buffered bytes whenever it changes.
            max_steps: Steps after which all rows are split by request; :data:`MAX_STEPS` by default.
        """
        self._on_size = on_size
        self._max_steps = MAX_STEPS if max_steps is None else max_steps
        self._steps: list[StepRows] = []
        self._size = 0
        self._num_merged = 0  # leading steps that merging has already looked at
        # Finalizers and not weak references: they do not run while the interpreter clears modules at its exit.
        self._assemblers: dict[str, weakref.finalize[..., RowAssembler]] = {}
        self._num_taken: dict[str, int] = {}  # leading steps whose rows a request has already taken
        # The finalizers of aborted requests run in whichever thread collects garbage.
        self._lock = threading.RLock()

    def add_request(self, request_id: str, assembler: RowAssembler) -> None:
        """Start collecting for a request, until :meth:`finish_request` or until its assembler is garbage-collected."""
        with self._lock:
            self.forget(request_id)
            finalizer = self._assemblers[request_id] = weakref.finalize(assembler, self.forget, request_id)
            finalizer.atexit = False
            # Buffered rows under this id belong to an earlier request.
            if any(request_id in step.index.only_entry for step in self._steps):
                self._num_taken[request_id] = len(self._steps)

    def receive(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Take the leading row outputs from an engine's outputs and return the remaining ones."""
        num_rows_outputs = 0
        for output in outputs:
            if output.request_id != ROWS_REQUEST_ID:
                break
            self._receive_output(output.kv_transfer_params, output.routed_experts)
            num_rows_outputs += 1
        return outputs[num_rows_outputs:]

    def record_json(self, request_id: str, first: int, stop: int, *, take: bool) -> list[list[bytes]] | None:
        """Return each number of a request's newest records as JSON, or None if they are of other positions.

        Hot path: without the lock, because steps are added in the caller's thread, and none is dropped by another
        thread while this request collects.

        Args:
            request_id: The request.
            first: The first position.
            stop: The position after the last one.
            take: Whether the request's assembler does not get the records up to the last one.
        """
        if request_id not in self._assemblers:
            return None
        found: list[list[bytes]] = []
        position, taken = stop - 1, 0
        for number in range(len(self._steps), 0, -1):
            step = self._steps[number - 1]
            index = step.index
            if index.projection != RECORDS or request_id not in index.only_entry:
                continue
            entry = index.only_entry[request_id]
            if entry < 0:
                return None
            starts, counts, offsets = step.extents
            start = starts[entry]
            end, row = start + counts[entry], offsets[entry] - start
            if start > position and not found:
                continue  # of a token whose output is yet to be processed
            if not start <= position < end:
                return None
            if not found:
                # A step with a later token is not taken as a whole.
                taken = number if end == stop else number - 1
            while position >= first and position >= start:
                found.append(step.record_json(row + position))
                position -= 1
            if position < first:
                break
        else:
            return None
        if take:
            self._num_taken[request_id] = max(taken, self._num_taken.get(request_id, 0))
        found.reverse()
        return found

    def flush(self, request_id: str) -> None:
        """Pass the buffered rows of a request to its assembler."""
        with self._lock:
            assembler = self._assembler_of(request_id)
            if assembler is not None:
                assembler.add(self._split_off(request_id))

    def finish_request(self, request_id: str) -> None:
        """Flush a request and stop collecting for it."""
        self.flush(request_id)
        self.forget(request_id)

    @property
    def num_bytes(self) -> int:
        """Number of buffered bytes."""
        return self._size

    def _assembler_of(self, request_id: str) -> RowAssembler | None:
        finalizer = self._assemblers.get(request_id)
        alive = None if finalizer is None else finalizer.peek()
        return None if alive is None else alive[0]

    def _receive_output(self, parameters: dict[str, Any], rows: npt.NDArray[np.uint8] | None) -> None:
        with self._lock:
            if rows is None:
                request_id, reason = decode_missing_reason(parameters)
                assembler = self._assembler_of(request_id)
                if assembler is not None:
                    assembler.missing_reason = reason
                return
            if self._assemblers:
                self.add_step(decode_step(parameters, rows))

    def add_step(self, step: StepRows) -> None:
        """Add the rows of one step, after splitting the buffered ones if they leave no room: `record_json` reads it."""
        with self._lock:
            if self._steps and (self._size + step.rows.nbytes > MAX_BYTES or len(self._steps) >= self._max_steps):
                for request_id in list(self._assemblers):
                    self.flush(request_id)
                self._clear()
            self._steps.append(step)
            self._size += step.rows.nbytes
            self._on_size(self._size)

    def forget(self, request_id: str) -> None:
        """Stop collecting for a request without flushing it."""
        with self._lock:
            finalizer = self._assemblers.pop(request_id, None)
            if finalizer is not None:
                finalizer.detach()
            self._num_taken.pop(request_id, None)
            if not self._assemblers:
                self._clear()

    def _clear(self) -> None:
        self._steps.clear()
        self._size = self._num_merged = 0
        self._num_taken.clear()
        self._on_size(0)

    def _split_off(self, request_id: str) -> list[RowChunk]:
        """Return the rows that a request has not taken yet, one chunk for each run of consecutive positions."""
        if len(self._steps) > self._num_merged:
            # Merging changes the number of steps, so only steps that no request has taken from may be merged.
            untouched = max(self._num_merged, *self._num_taken.values(), 0)
            self._steps[untouched:] = merge_steps(self._steps[untouched:])
            self._num_merged = len(self._steps)
        runs: list[_Run] = []
        # The codes of a position's rows do not change, so the last row of a position is in the last run with its codes.
        # A record's code is its width, which depends on the other requests of the step.
        latest: dict[tuple[bytes, tuple[int, ...]], _Run] = {}
        for step in self._steps[self._num_taken.get(request_id, 0) :]:
            index = step.index
            starts, counts, offsets = step.extents
            for entry in index.entries_of(request_id):
                codes, start = index.codes[entry], starts[entry]
                key = index.projection, () if index.projection == RECORDS else codes
                run = latest.get(key)
                if run is None or run.stop != start or run.codes != codes:
                    run = latest[key] = _Run(codes, index.projection, start, start)
                    runs.append(run)
                part = step.rows[offsets[entry] : offsets[entry + 1]]
                run.parts.append(part)
                run.others = step.rows.nbytes - part.nbytes
                run.stop += counts[entry]
        self._num_taken[request_id] = len(self._steps)
        return [
            RowChunk(request_id, run.start, run.stop - run.start, run.codes, run.joined(), run.projection)
            for run in runs
        ]
