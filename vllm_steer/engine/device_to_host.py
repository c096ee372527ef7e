# SPDX-License-Identifier: Apache-2.0
"""Captured rows on their way out of the worker: arena → copy on the main stream → pinned memory on a side stream.

The copy frees the arena for the next step. Where rows leave projected, their product with the directions takes its
place, and k numbers leave of each. The side stream has transfers alone, no kernel: once kernels have run on a second
stream, an H200 takes longer from each kernel of a CUDA graph to the next, as long as the process lives
(``benchmarks/timeline.py``). Device-to-host copies are as many as there are forms in the step, however many sites and
requests; whose rows they are is settled when they have arrived, off the thread that launches the next step wherever
vLLM hands outputs over asynchronously.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_steer.capture.step_plan import CaptureBatch, CapturePlan
from vllm_steer.capture.step_rows import IntArray, StepRows
from vllm_steer.taps.projection import products_at

ATTRIBUTE = "steering_rows"
Products: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""What makes products, as :func:`vllm_steer.taps.projection.products_at` defines them."""


@dataclass(frozen=True)
class Transfer:
    """One form in which rows leave: those at ``rows`` in the arena, None for all, times ``directions`` ``[k, hidden]``
    float32 on the device, None for the rows as they are."""

    projection: bytes
    rows: IntArray | None
    directions: torch.Tensor | None


@dataclass(frozen=True)
class PendingRows:
    """One step's rows, in flight: ``rows``, by projection, ``[n, bytes of a row]`` uint8 in host memory once ``event``
    has happened.

    ``plan`` says whose they are; where draft tokens make the host's positions uncertain it is a
    :class:`CaptureBatch`, the rows of every form are those of the whole step, and ``position`` ``[tokens]`` are the
    device's.
    """

    plan: CapturePlan | CaptureBatch
    rows: Mapping[bytes, torch.Tensor]
    position: torch.Tensor | None = None
    event: Any = None
    release: Callable[[], None] | None = None

    def arrived(self) -> tuple[StepRows, ...]:
        """Wait for the copy; the result, of each form a step of its own, owns its memory."""
        if self.event is not None:
            self.event.synchronize()
        plan = self.plan
        certain = isinstance(plan, CapturePlan)
        if isinstance(plan, CaptureBatch):
            if self.position is None:
                raise RuntimeError("a step with draft tokens has left without its positions")
            plan = plan.plan_at(self.position.numpy()[plan.token].tolist())
        steps = []
        for stream in plan.streams:
            rows = self.rows[stream.index.projection].numpy()
            if not certain:
                rows = rows[: plan.num_rows] if stream.arena_rows is None else rows[stream.arena_rows]
            steps.append(plan.make_step_rows(stream, self._owned(rows)))
        if self.release is not None:
            self.release()
        return tuple(steps)

    def _owned(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Not torch's copy: its threads would contend with those that launch the next step."""
        return rows if self.release is None else rows.copy()


class DeviceToHostCopier:
    """Starts each step's rows on their way, without a sync.

    Pinned buffers are kept and used again: as many come to be as steps are in flight at one time, two or three.
    """

    def __init__(self, device: torch.device, make_products: Products = products_at) -> None:
        self._device = device
        self._make_products = make_products
        self._leaving = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: deque[tuple[torch.Tensor, torch.Tensor, Any]] = deque()
        # Of each form, the last places that were uploaded: a steady batch has the same ones in every step.
        self._places: dict[bytes, tuple[IntArray, torch.Tensor]] = {}

    def start(
        self,
        stored: torch.Tensor,
        position: torch.Tensor | None,
        plan: CapturePlan | CaptureBatch,
        forms: tuple[Transfer, ...],
    ) -> PendingRows:
        """``stored`` ``[rows, hidden]`` is the used part of the arena, which the next step on this stream may store to;
        ``position`` ``[tokens]`` int64 or None."""
        # The runner's own buffer, which it writes again before the next step of ours begins.
        where = None if position is None else position.clone()
        parts = {form.projection: self._form(stored, form) for form in forms}
        if self._leaving is None:
            return PendingRows(plan, parts, where)
        buffers = self._buffers(sum(part.nbytes for part in parts.values()), 0 if where is None else len(where))
        host_rows, host_where, event = buffers
        arriving: dict[bytes, torch.Tensor] = {}
        self._leaving.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._leaving):
            begin = 0
            for projection, part in parts.items():
                part.record_stream(self._leaving)
                host = host_rows[begin : begin + part.nbytes].view(part.shape)
                host.copy_(part, non_blocking=True)
                arriving[projection], begin = host, begin + part.nbytes
            if where is not None:
                where.record_stream(self._leaving)
                host_where[: len(where)].copy_(where, non_blocking=True)
            event.record()
        return PendingRows(
            plan,
            arriving,
            None if where is None else host_where[: len(where)],
            event,
            lambda: self._free.append(buffers),
        )

    def _form(self, stored: torch.Tensor, form: Transfer) -> torch.Tensor:
        """``[n, bytes of a row]`` uint8, in memory of its own."""
        places = None if form.rows is None else self._uploaded(form.projection, form.rows)
        if form.directions is not None:
            return self._make_products(stored, places, form.directions).view(torch.uint8)
        return (stored.clone() if places is None else stored.index_select(0, places)).view(torch.uint8)

    def _uploaded(self, projection: bytes, places: IntArray) -> torch.Tensor:
        known = self._places.get(projection)
        if known is not None and known[0] is places:
            return known[1]
        if len(self._places) > 64:
            self._places.clear()
        uploaded = torch.from_numpy(places)
        if self._leaving is not None:
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


class AsyncRows(AsyncModelRunnerOutput):  # type: ignore[misc]
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
            return AsyncRows(output, pending)
        setattr(output, ATTRIBUTE, pending.arrived())
        return output
    original = output.get_output

    def get_output() -> Any:
        result = original()
        setattr(result, ATTRIBUTE, pending.arrived())
        return result

    output.get_output = get_output
    return output
