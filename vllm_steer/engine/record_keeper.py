# SPDX-License-Identifier: Apache-2.0
"""Records of running requests in the scheduler: stops that fired, and records for requests that are computed again.

The records of requests with gates, stops or live strengths are kept until the request ends. A step costs a few array
operations, whatever its number of requests: records are split by request only when one is preempted, or when the buffer
is full (:class:`~vllm_steer.capture.row_receiver.RowReceiver`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_steer.capture.row_assembler import RowAssembler
from vllm_steer.capture.row_payload import RECORDS
from vllm_steer.capture.row_receiver import RowReceiver
from vllm_steer.capture.step_rows import StepRows
from vllm_steer.engine.model_output import rows_of
from vllm_steer.program.records import STOP_COLUMN

_MAX_STEPS = 512
"""Steps after which records are split by request. Records are small, and few requests are preempted."""
REPLAYS_ATTRIBUTE = "steering_replays"
"""Attribute of vLLM's ``SchedulerOutput`` with the records of resumed requests, by request id."""


@dataclass(frozen=True)
class Replay:
    """Records of the tokens from position ``start`` on that a request had computed before it was preempted."""

    start: int
    records: npt.NDArray[np.float32]
    """``[tokens, columns]``."""
    generated: npt.NDArray[np.int64]
    """The generated tokens up to the last recorded one."""
    prompt_len: int

    @property
    def stop(self) -> int:
        """Position after the last recorded one."""
        return self.start + len(self.records)


@dataclass(frozen=True)
class FiredStop:
    """A stop that fired in a step."""

    number: int
    """Number of the stop in the request, from 1."""
    position: int
    offset: int
    """Number of tokens of the request in the step ahead of it."""
    record: npt.NDArray[np.float32]


class RecordKeeper:
    """Records of the running requests of one scheduler."""

    def __init__(self) -> None:
        self._receiver = RowReceiver(max_steps=_MAX_STEPS)
        self._assemblers: dict[str, RowAssembler] = {}
        self._preempted: set[str] = set()
        self._first_stops: dict[str, int] = {}

    def add_request(self, request_id: str, first_stop: int = 0) -> None:
        """Keep the records of a request from now on. Its stops are ignored before position ``first_stop``."""
        if first_stop:
            self._first_stops[request_id] = first_stop
        # The assembler only joins records, whose form does not depend on the model.
        assembler = self._assemblers[request_id] = RowAssembler(0, 0, torch.float32)
        self._receiver.add_request(request_id, assembler)

    def remove_request(self, request_id: str) -> None:
        """Forget a request that has ended."""
        if self._assemblers.pop(request_id, None) is not None:
            self._receiver.finish_request(request_id)
            self._preempted.discard(request_id)
            self._first_stops.pop(request_id, None)

    def receive(self, model_output: Any) -> dict[str, FiredStop]:
        """Keep the records of a step and return the first stop of each request that fired in it."""
        fired: dict[str, FiredStop] = {}
        if self._assemblers:
            for step in rows_of(model_output):
                if step.index.projection == RECORDS:
                    self._receiver.add_step(step)
                    fired.update(_fired_stops(step, self._first_stops))
        return {request_id: stop for request_id, stop in fired.items() if request_id in self._assemblers}

    def attach_replays(self, scheduled: Any, requests: Mapping[str, Any]) -> None:
        """Attach the records of the requests that a scheduler output resumes."""
        if self._assemblers and scheduled.preempted_req_ids:
            self._preempted |= scheduled.preempted_req_ids & self._assemblers.keys()
        # A reset of the prefix cache preempts requests that the same step resumes.
        if self._preempted:
            replays: dict[str, Replay] = {}
            for request_id in self._preempted & scheduled.num_scheduled_tokens.keys():
                replay = self._replay(request_id, requests[request_id])
                if replay is not None:
                    replays[request_id] = replay
            self._preempted -= scheduled.num_scheduled_tokens.keys()
            if replays:
                setattr(scheduled, REPLAYS_ATTRIBUTE, replays)

    def _replay(self, request_id: str, request: Any) -> Replay | None:
        """Return the records of a request's tokens but the last one. They are final."""
        self._receiver.flush(request_id)
        positions, records = self._assemblers[request_id].records(request.num_tokens - 1)
        if not len(positions):
            return None
        # Positions that came from the prefix cache have no record; the last run of positions counts.
        breaks = np.flatnonzero(np.diff(positions) != 1)
        first = int(breaks[-1]) + 1 if len(breaks) else 0
        records = records[first:].copy()
        records[:, STOP_COLUMN] = 0.0
        prompt_len = request.num_prompt_tokens
        count = max(int(positions[-1]) + 1 - prompt_len, 0)
        generated = np.array(request.output_token_ids[:count], dtype=np.int64)
        return Replay(int(positions[first]), records, generated, prompt_len)


def replays_of(scheduled: Any) -> Mapping[str, Replay]:
    """Return the records that a scheduler output carries for resumed requests."""
    replays: Mapping[str, Replay] = getattr(scheduled, REPLAYS_ATTRIBUTE, {})
    return replays


def _fired_stops(step: StepRows, first_stops: Mapping[str, int]) -> dict[str, FiredStop]:
    records = step.rows.view(np.float32)
    rows = np.flatnonzero(records[:, STOP_COLUMN])
    if not len(rows):
        return {}
    starts, _, offsets = step.extents
    fired: dict[str, FiredStop] = {}
    for row in rows.tolist():
        entry = int(np.searchsorted(offsets, row, side="right")) - 1
        offset = row - offsets[entry]
        stop = FiredStop(int(records[row, STOP_COLUMN]), starts[entry] + offset, offset, records[row].copy())
        request_id = step.index.request_ids[entry]
        if stop.position >= first_stops.get(request_id, 0):
            fired.setdefault(request_id, stop)
    return fired
