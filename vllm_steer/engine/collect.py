# SPDX-License-Identifier: Apache-2.0
"""Captured rows on their way out of the worker: arena → copy on one side stream → pinned memory on another.

The copy frees the arena for the next step, which waits for it; meanwhile the main stream makes logits and samples.
Where rows leave projected, their product with the directions takes the copy's place, and k numbers leave of each. The
way to the host has a stream of its own, so that a long one holds no later copy up, and thereby no step. Device-to-host
copies are as many as there are forms in the step, however many sites and requests; whose rows they are is settled when
they have arrived, off the thread that launches the next step wherever vLLM hands outputs over asynchronously.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_steer.engine.step_rows import Integers, Plan, Reading, StepRows

ATTRIBUTE = "steering_rows"


@dataclass(frozen=True)
class Leaving:
    """One form in which rows leave: those at ``rows`` in the arena, None for all, times ``directions`` ``[k, hidden]``
    float32 on the device, None for the rows as they are."""

    projection: bytes
    rows: Integers | None
    directions: torch.Tensor | None


@dataclass(frozen=True)
class PendingRows:
    """One step's rows, in flight: ``rows``, by projection, ``[n, bytes of a row]`` uint8 in host memory once ``event``
    has happened.

    ``plan`` says whose they are; where draft tokens make the host's positions uncertain it is a :class:`Reading`, the
    rows of every form are those of the whole step, and ``position`` ``[tokens]`` are the device's.
    """

    plan: Plan | Reading
    rows: Mapping[bytes, torch.Tensor]
    position: torch.Tensor | None = None
    event: Any = None
    release: Callable[[], None] | None = None

    def arrived(self) -> tuple[StepRows, ...]:
        """Wait for the copy; the result, of each form a step of its own, owns its memory."""
        if self.event is not None:
            self.event.synchronize()
        plan = self.plan
        certain = isinstance(plan, Plan)
        if isinstance(plan, Reading):
            if self.position is None:
                raise RuntimeError("a step with draft tokens has left without its positions")
            plan = plan.spread(self.position.numpy()[plan.token].tolist())
        steps = []
        for channel in plan.channels:
            rows = self.rows[channel.entries.projection].numpy()
            if not certain:
                rows = rows[: plan.num_rows] if channel.rows is None else rows[channel.rows]
            steps.append(plan.step_of(channel, self._owned(rows)))
        if self.release is not None:
            self.release()
        return tuple(steps)

    def _owned(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Not torch's copy: its threads would contend with those that launch the next step."""
        return rows if self.release is None else rows.copy()


class _Streams:
    """``copied`` happens on ``copying`` when the arena has been read."""

    def __init__(self, device: torch.device) -> None:
        self.copying, self.leaving = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.copied = torch.cuda.Event()


class Departures:
    """Starts each step's rows on their way, without a sync.

    Pinned buffers are kept and used again: as many come to be as steps are in flight at one time, two or three.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = _Streams(device) if device.type == "cuda" else None
        self._arena_is_read = False
        self._free: deque[tuple[torch.Tensor, torch.Tensor, Any]] = deque()
        # Of each form, the last places that were uploaded: a steady batch has the same ones in every step.
        self._places: dict[bytes, tuple[Integers, torch.Tensor]] = {}

    def start(
        self, stored: torch.Tensor, position: torch.Tensor | None, plan: Plan | Reading, forms: tuple[Leaving, ...]
    ) -> PendingRows:
        """``stored`` ``[rows, hidden]`` is the used part of the arena, to be left as it is until
        :meth:`finish_reading`; ``position`` ``[tokens]`` int64 or None."""
        # The runner's own buffer, which it writes again before the next step of ours begins.
        where = None if position is None else position.clone()
        streams = self._streams
        if streams is None:
            return PendingRows(plan, {form.projection: self._form(stored, form) for form in forms}, where)
        streams.copying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams.copying):
            parts = {form.projection: self._form(stored, form) for form in forms}
            streams.copied.record()
        self._arena_is_read = True
        buffers = self._buffers(sum(part.nbytes for part in parts.values()), 0 if where is None else len(where))
        host_rows, host_where, event = buffers
        arriving: dict[bytes, torch.Tensor] = {}
        streams.leaving.wait_event(streams.copied)
        with torch.cuda.stream(streams.leaving):
            begin = 0
            for projection, part in parts.items():
                part.record_stream(streams.leaving)
                host = host_rows[begin : begin + part.nbytes].view(part.shape)
                host.copy_(part, non_blocking=True)
                arriving[projection], begin = host, begin + part.nbytes
            if where is not None:
                where.record_stream(streams.leaving)
                host_where[: len(where)].copy_(where, non_blocking=True)
            event.record()
        return PendingRows(
            plan,
            arriving,
            None if where is None else host_where[: len(where)],
            event,
            lambda: self._free.append(buffers),
        )

    def finish_reading(self) -> None:
        """Before the arena is stored to: let the current stream wait until the last step's rows are out of it."""
        if self._arena_is_read and self._streams is not None:
            torch.cuda.current_stream().wait_event(self._streams.copied)
        self._arena_is_read = False

    def _form(self, stored: torch.Tensor, form: Leaving) -> torch.Tensor:
        """``[n, bytes of a row]`` uint8, in memory of its own, on the current stream."""
        chosen = stored if form.rows is None else stored.index_select(0, self._uploaded(form.projection, form.rows))
        if form.directions is not None:
            if self._streams is not None:
                # Gathered on the main stream; its memory is not to be used again before this product is done.
                form.directions.record_stream(self._streams.copying)
            # The definition: rows and directions in float32, as the front end has it for what it projects itself.
            chosen = chosen.float() @ form.directions.T
        elif form.rows is None:
            chosen = stored.clone()
        return chosen.view(torch.uint8)

    def _uploaded(self, projection: bytes, places: Integers) -> torch.Tensor:
        known = self._places.get(projection)
        if known is not None and known[0] is places:
            return known[1]
        if len(self._places) > 64:
            self._places.clear()
        uploaded = torch.from_numpy(places)
        if self._streams is not None:
            uploaded = uploaded.pin_memory().to(self._device, non_blocking=True)
        self._places[projection] = (places, uploaded)
        return uploaded

    def _buffers(self, num_bytes: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """A free set of buffers that is large enough. Sizes are powers of two, so that there are soon enough."""
        for _ in range(len(self._free)):
            rows, where, event = self._free.popleft()
            if len(rows) >= num_bytes and len(where) >= tokens:
                return rows, where, event
        size = 1 << (num_bytes - 1).bit_length()
        return (
            torch.empty(size, dtype=torch.uint8, pin_memory=True),
            torch.empty(1 << tokens.bit_length(), dtype=torch.int64, pin_memory=True),
            torch.cuda.Event(blocking=True),
        )

    @property
    def num_bytes(self) -> int:
        """Of the buffers that are kept and free."""
        return sum(rows.nbytes + where.nbytes for rows, where, _ in tuple(self._free))


class LateRows(AsyncModelRunnerOutput):  # type: ignore[misc]
    """An output that is known before its rows have arrived, such as that of an earlier pipeline stage."""

    def __init__(self, output: Any, pending: PendingRows) -> None:
        self._output = output
        self._pending = pending

    def get_output(self) -> Any:
        setattr(self._output, ATTRIBUTE, self._pending.arrived())
        return self._output


def attach(output: Any, pending: PendingRows | None) -> Any:
    """Put a step's rows on its model output; an asynchronous output takes them when it is asked for."""
    if pending is None or output is None:
        return output
    if not hasattr(output, "get_output"):
        # An earlier pipeline stage's output is one that all steps share.
        output = copy.copy(output)
        if pending.event is not None:
            return LateRows(output, pending)
        setattr(output, ATTRIBUTE, pending.arrived())
        return output
    original = output.get_output

    def get_output() -> Any:
        result = original()
        setattr(result, ATTRIBUTE, pending.arrived())
        return result

    output.get_output = get_output
    return output
