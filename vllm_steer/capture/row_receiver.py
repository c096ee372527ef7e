# SPDX-License-Identifier: Apache-2.0
"""Captured rows in the front end's process: whole steps as they arrive, of which each request takes its own.

Nothing is done per request while a batch decodes: steps are kept as they came, and split when a request ends or wants
its rows at once, or when they have grown to :data:`KEPT_BYTES` or :data:`KEPT_STEPS`. So what one long request can keep
alive of its neighbours' rows is bounded by those. Small rows are brought together by request first, for all requests at
once (:func:`~vllm_steer.capture.step_rows.brought_together`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_steer.capture.assembly import Assembly, Chunk
from vllm_steer.capture.step_rows import StepRows, brought_together, decode_row_index
from vllm_steer.engine.row_sender import REASON_KEY, ROWS_KEY, ROWS_REQUEST_ID

KEPT_BYTES = 32 << 20
KEPT_STEPS = 64


@dataclass
class _Run:
    """Rows of one request whose positions follow one another."""

    codes: tuple[int, ...]
    projection: bytes
    start: int
    stop: int
    parts: list[npt.NDArray[np.uint8]] = field(default_factory=list)


class RowReceiver:
    """Steps in the order in which they ran, and the requests that run. One for each engine client; ``show`` is told the
    bytes of rows held whenever they change."""

    def __init__(self, show: Callable[[int], None] = lambda num_bytes: None) -> None:
        self._show = show
        self._steps: list[StepRows] = []
        self._size = 0
        # How many of them have been looked at for what can be brought together.
        self._together = 0
        self._following: dict[str, weakref.ref[Assembly]] = {}
        # How many of the kept steps a request has taken its rows out of, if any.
        self._taken: dict[str, int] = {}
        # Assemblies of aborted requests end wherever they are collected.
        self._lock = threading.RLock()

    def follow(self, request_id: str, assembly: Assembly) -> None:
        """A request that captures has been added; it is forgotten when it ends, or its assembly does."""
        with self._lock:
            self._following[request_id] = weakref.ref(assembly, lambda _: self._forget(request_id))
            # Rows of an earlier request of that id are not this one's.
            if any(request_id in step.entries.index for step in self._steps):
                self._taken[request_id] = len(self._steps)

    def restore_program(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Take the rows out of an engine's outputs, at whose head they are; returns the rest."""
        carried = 0
        for output in outputs:
            if output.request_id != ROWS_REQUEST_ID:
                break
            self._receive(output.kv_transfer_params, output.routed_experts)
            carried += 1
        return outputs[carried:]

    def settle(self, request_id: str) -> None:
        """Give a request's assembly what has come for it."""
        with self._lock:
            follower = self._following.get(request_id)
            assembly = None if follower is None else follower()
            if assembly is not None:
                assembly.add(self._split_off(request_id))

    def end(self, request_id: str) -> None:
        """A request has ended: give its assembly the rest, and forget it."""
        self.settle(request_id)
        self._forget(request_id)

    @property
    def num_bytes(self) -> int:
        """Bytes of rows held."""
        return self._size

    def _receive(self, about: dict[str, Any], rows: npt.NDArray[np.uint8] | None) -> None:
        with self._lock:
            if rows is None:
                request_id, reason = about[REASON_KEY]
                follower = self._following.get(request_id)
                assembly = None if follower is None else follower()
                if assembly is not None:
                    assembly.say(reason)
                return
            if not self._following:
                return
            wire, start, count = about[ROWS_KEY]
            entries = decode_row_index(wire)
            self._steps.append(StepRows(entries, np.frombuffer(start, np.int64), np.frombuffer(count, np.int64), rows))
            self._size += rows.nbytes
            if self._size > KEPT_BYTES or len(self._steps) > KEPT_STEPS:
                for request_id in list(self._following):
                    self.settle(request_id)
                self._clear()
            else:
                self._show(self._size)

    def _forget(self, request_id: str) -> None:
        with self._lock:
            self._following.pop(request_id, None)
            self._taken.pop(request_id, None)
            if not self._following:
                self._clear()

    def _clear(self) -> None:
        self._steps.clear()
        self._size = self._together = 0
        self._taken.clear()
        self._show(0)

    def _split_off(self, request_id: str) -> list[Chunk]:
        """Join the request's rows of the steps that are new to it, as long as positions follow one another."""
        if len(self._steps) > self._together:
            untouched = max(self._together, *self._taken.values(), 0)
            self._steps[untouched:] = brought_together(self._steps[untouched:])
            self._together = len(self._steps)
        runs: list[_Run] = []
        latest: dict[tuple[bytes, tuple[int, ...]], _Run] = {}
        for step in self._steps[self._taken.get(request_id, 0) :]:
            entries = step.entries
            starts, counts, rows = step.extents
            for entry in entries.index.get(request_id, ()):
                codes, start = entries.codes[entry], starts[entry]
                run = latest.get((entries.projection, codes))
                if run is None or run.stop != start:
                    run = latest[entries.projection, codes] = _Run(codes, entries.projection, start, start)
                    runs.append(run)
                run.parts.append(step.rows[rows[entry] : rows[entry + 1]])
                run.stop += counts[entry]
        self._taken[request_id] = len(self._steps)
        return [
            Chunk(request_id, run.start, run.stop - run.start, run.codes, np.concatenate(run.parts), run.projection)
            for run in runs
        ]
