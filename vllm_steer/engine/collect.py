# SPDX-License-Identifier: Apache-2.0
"""Captured rows on their way out of the worker: arena → copy on the main stream → pinned memory on a side stream.

The copy on the main stream is what keeps the next step from overwriting rows that are still leaving. There is one
device-to-host copy per step, however many sites and requests; splitting it by request happens when it has arrived, off
the thread that launches the next step wherever vLLM hands outputs over asynchronously.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from vllm_steer.program import Resolved
from vllm_steer.taps.tables import Tables

ATTRIBUTE = "steering_rows"


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Rows of consecutive positions of one request.

    ``captures`` names what each position stored, as ``2 * site + before``; ``rows`` holds ``count * len(captures)``
    rows of the hidden size in the model's dtype, position by position.
    """

    request_id: str
    start: int
    count: int
    captures: tuple[int, ...]
    rows: bytes


@dataclass(frozen=True)
class Planned:
    """One capturing request's part of a step: ``count`` tokens from ``token`` on in the batch."""

    request_id: str
    resolved: Resolved
    token: int
    count: int


@dataclass(frozen=True)
class PendingRows:
    """One step's rows, in flight."""

    planned: tuple[Planned, ...]
    rows: torch.Tensor
    position: torch.Tensor
    event: Any

    def arrived(self) -> list[Chunk]:
        """Wait for the copy and split it by request. The positions are the device's own."""
        if self.event is not None:
            self.event.synchronize()
        data = memoryview(self.rows.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
        row_bytes = self.rows.shape[1] * self.rows.element_size()
        position = self.position.numpy()
        chunks = []
        at = 0
        for plan in self.planned:
            first = int(position[plan.token])
            for start, stop, segment in plan.resolved.spans(first, first + plan.count):
                if segment.row is None or not segment.num_captures:
                    continue
                end = at + (stop - start) * segment.num_captures * row_bytes
                codes = segment.row.capture_codes
                chunks.append(Chunk(plan.request_id, start, stop - start, codes, bytes(data[at:end])))
                at = end
        return chunks


def snapshot(
    tables: Tables, position: torch.Tensor, planned: tuple[Planned, ...], num_rows: int, stream: Any
) -> PendingRows:
    """Start one step's rows on their way; ``num_rows`` of the arena are in use at most. No sync."""
    rows = tables.arena[:num_rows].clone()
    where = position.to(torch.int64, copy=True)
    if stream is None:
        return PendingRows(planned, rows, where, None)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        rows.record_stream(stream)
        where.record_stream(stream)
        host_rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows, non_blocking=True)
        host_where = torch.empty(where.shape, dtype=where.dtype, pin_memory=True).copy_(where, non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
    return PendingRows(planned, host_rows, host_where, event)


def attach(output: Any, pending: PendingRows | None) -> Any:
    """Put a step's rows on its model output; an asynchronous output takes them when it is asked for."""
    if pending is None or output is None:
        return output
    if not hasattr(output, "get_output"):
        setattr(output, ATTRIBUTE, pending.arrived())
        return output
    original = output.get_output

    def get_output() -> Any:
        result = original()
        setattr(result, ATTRIBUTE, pending.arrived())
        return result

    output.get_output = get_output
    return output
