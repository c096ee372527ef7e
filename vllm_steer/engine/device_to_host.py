# SPDX-License-Identifier: Apache-2.0
"""Copy a step's captured rows from the device arena to host memory, without a sync.

The rows are first copied on the main stream, which frees the arena for the next step. If a request captures
projections, the product of the rows with its directions replaces the copy, so only k numbers per row are transferred.
The result then goes to pinned memory on a side stream, with one device-to-host copy per :class:`Transfer`, however many
sites and requests the step has. A small result stays on the main stream, which saves the host the switch to another
one. Rows are split by request only after they have arrived, off the thread that launches the next step whenever vLLM
processes outputs asynchronously. The rows of a large step leave in their pinned buffers, which return to the pool when
nothing refers to them: with one worker, vLLM waits for the rows in the thread that schedules, and a copy to new memory
took more of its time there than all else (one layer of an 8B model: 50 ms per 8,192 tokens on the host of an H200).

The side stream must not run kernels: once a second stream has run any, an H200 takes longer between the kernels of
every CUDA graph until the process ends.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vllm_steer.capture.step_plan import CapturePlan, UncertainPlan
from vllm_steer.capture.step_rows import IntArray, StepRows
from vllm_steer.taps.projection import products_at
from vllm_steer.taps.tables import upload

Products: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""A function with the signature and result of :func:`vllm_steer.taps.projection.products_at`."""
_MAX_CACHED_UPLOADS = 64
SMALL_BYTES = 64 << 10
"""Size of a step's rows up to which they are copied on the main stream."""
_LENT_BYTES, _MAX_LENT = 1 << 20, 4
"""Size of a step's rows from which they leave in their buffers, and most buffers that are out at one time."""


@dataclass(frozen=True)
class Transfer:
    """Rows of one step that leave the device in one format.

    Attributes:
        projection: Digest of the directions, empty for unprojected rows.
        rows: Indices of the rows in the arena, None for all rows of the step.
        directions: ``[k, hidden]`` float32 on the device, None for unprojected rows.
    """

    projection: bytes
    rows: IntArray | None
    directions: torch.Tensor | None


@dataclass(frozen=True)
class PendingRows:
    """Captured rows of one step, in flight to host memory.

    Attributes:
        plan: Which request each row belongs to. With speculative decoding the host does not know the positions of a
            step in advance; it is then an :class:`UncertainPlan`, and every transfer has all rows of the step.
        rows: By projection, ``[n, bytes of a row]`` uint8 host tensors, valid once ``event`` has completed.
        position: ``[tokens]`` int64, the positions on the device; required if ``plan`` is an :class:`UncertainPlan`.
        event: CUDA event of the copy, None if the rows have already arrived.
        release: Called after the rows were copied, to reuse their buffers. None if the rows own their memory.
        lend: Called with the array of the rows instead; it returns whether the array may keep its buffers until it is
            garbage. None if the rows own their memory.
    """

    plan: CapturePlan | UncertainPlan
    rows: Mapping[bytes, torch.Tensor]
    position: torch.Tensor | None = None
    event: Any = None
    release: Callable[[], None] | None = None
    lend: Callable[[npt.NDArray[np.uint8]], bool] | None = None

    def wait(self) -> tuple[StepRows, ...]:
        """Wait for the copy and return the rows, one :class:`StepRows` per projection, each owning its memory."""
        if self.event is not None:
            self.event.synchronize()
        plan = self.plan
        certain = isinstance(plan, CapturePlan)
        if not isinstance(plan, CapturePlan):
            if self.position is None:
                raise RuntimeError("rows of a step with draft tokens were sent without their positions")
            plan = plan.plan_at(self.position.numpy()[plan.token].tolist())
        arrived = {projection: rows.numpy() for projection, rows in self.rows.items()}
        lent = self.lend is not None and len(arrived) == 1 and self.lend(*arrived.values())
        steps = []
        for stream in plan.streams:
            rows = arrived[stream.index.projection]
            if not certain:
                rows = rows[: plan.num_rows] if stream.arena_rows is None else rows[stream.arena_rows]
            if self.release is not None and not lent and not rows.flags.owndata:
                # NumPy copies on this thread; torch's copy threads would contend with the one that launches steps.
                rows = rows.copy()
            steps.append(plan.make_step_rows(stream, rows))
        if self.release is not None and not lent:
            self.release()
        return tuple(steps)


@dataclass(frozen=True)
class _PinnedBuffers:
    """Pinned destination buffers of one step, and the event that marks its copies as complete."""

    rows: torch.Tensor
    position: torch.Tensor
    event: Any

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.position.nbytes


class DeviceToHostCopier:
    """Starts the copies of captured rows and pools the pinned buffers they go to.

    The pool holds as many buffers as steps are in flight at one time, which is two or three, and those that were lent.
    """

    def __init__(self, device: torch.device, make_products: Products = products_at) -> None:
        self._device = device
        self._make_products = make_products
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: deque[_PinnedBuffers] = deque()
        self._lent: deque[None] = deque()  # an element per buffer; unlike a number, it is changed by several threads
        # The last uploaded row indices of each projection: a steady batch uses the same array in every step.
        self._uploads: dict[bytes, tuple[IntArray, torch.Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Total size in bytes of the pooled buffers that are free."""
        return sum(buffers.nbytes for buffers in tuple(self._free))

    def start(
        self,
        stored: torch.Tensor,
        position: torch.Tensor | None,
        plan: CapturePlan | UncertainPlan,
        transfers: tuple[Transfer, ...],
    ) -> PendingRows:
        """Enqueue the copies of one step on the current stream and the side stream.

        Args:
            stored: ``[rows, hidden]``, the part of the arena that the step filled. Later work on the current stream may
                overwrite it.
            position: ``[tokens]`` int64 positions on the device, or None if the host knows them.
            plan: Which request each row belongs to.
            transfers: Formats in which rows leave the device.

        Returns:
            The rows in flight.
        """
        # vLLM's runner reuses its position buffer for the next step.
        position = None if position is None else position.clone()
        parts = {transfer.projection: self._gather(stored, transfer) for transfer in transfers}
        if self._stream is None:
            return PendingRows(plan, parts, position)
        num_bytes = sum(part.nbytes for part in parts.values())
        buffers = self._take_buffers(num_bytes, 0 if position is None else len(position))
        if num_bytes <= SMALL_BYTES:
            return self._copy(parts, position, plan, buffers, torch.Tensor.copy_)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            return self._copy(parts, position, plan, buffers, _copy_on_side_stream)

    def _copy(
        self,
        parts: Mapping[bytes, torch.Tensor],
        position: torch.Tensor | None,
        plan: CapturePlan | UncertainPlan,
        buffers: _PinnedBuffers,
        copy: Callable[..., torch.Tensor],
    ) -> PendingRows:
        """Enqueue the copies to pinned memory on the current stream."""
        rows: dict[bytes, torch.Tensor] = {}
        begin = 0
        for projection, part in parts.items():
            end = begin + part.nbytes
            rows[projection] = copy(buffers.rows[begin:end].view(part.shape), part, non_blocking=True)
            begin = end
        host = None if position is None else copy(buffers.position[: len(position)], position, non_blocking=True)
        buffers.event.record()
        release, lend = partial(self._free.append, buffers), partial(self._lend, buffers)
        return PendingRows(plan, rows, host, buffers.event, release, lend)

    def _lend(self, buffers: _PinnedBuffers, rows: npt.NDArray[np.uint8]) -> bool:
        """Leave buffers to the array of their rows until it is garbage, unless it is small or too many are out."""
        if rows.nbytes < _LENT_BYTES or len(self._lent) >= _MAX_LENT:
            return False

        def take_back() -> None:
            self._free.append(buffers)
            self._lent.pop()

        self._lent.append(None)
        weakref.finalize(rows, take_back).atexit = False
        return True

    def _gather(self, stored: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        """Return a new tensor ``[n, bytes of a row]`` uint8 with the rows of one transfer."""
        indices = None if transfer.rows is None else self._upload(transfer.projection, transfer.rows)
        if transfer.directions is not None:
            return self._make_products(stored, indices, transfer.directions).view(torch.uint8)
        return (stored.clone() if indices is None else stored.index_select(0, indices)).view(torch.uint8)

    def _upload(self, projection: bytes, indices: IntArray) -> torch.Tensor:
        known = self._uploads.get(projection)
        if known is not None and known[0] is indices:
            return known[1]
        if len(self._uploads) > _MAX_CACHED_UPLOADS:
            self._uploads.clear()
        uploaded = upload(torch.from_numpy(indices), self._device)
        self._uploads[projection] = (indices, uploaded)
        return uploaded

    def _take_buffers(self, num_bytes: int, num_tokens: int) -> _PinnedBuffers:
        """Return free buffers that are large enough, or allocate some.

        Smaller free buffers are dropped. Sizes are powers of two, so that the pool soon fits every step.
        """
        for _ in range(len(self._free)):
            buffers = self._free.popleft()
            if len(buffers.rows) >= num_bytes and len(buffers.position) >= num_tokens:
                return buffers
        return _PinnedBuffers(
            torch.empty(1 << (num_bytes - 1).bit_length(), dtype=torch.uint8, pin_memory=True),
            torch.empty(1 << num_tokens.bit_length(), dtype=torch.int64, pin_memory=True),
            torch.cuda.Event(blocking=True),
        )


def _copy_on_side_stream(pinned: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
    """Copy on the current stream a tensor whose memory another stream allocated."""
    source.record_stream(torch.cuda.current_stream())
    return pinned.copy_(source, non_blocking=non_blocking)
