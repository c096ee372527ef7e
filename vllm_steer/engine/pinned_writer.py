# SPDX-License-Identifier: Apache-2.0
"""Batched writes to rows of device tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

_ALIGNMENT = 16
"""Bytes to which each part of an upload is aligned, so that it can be viewed in any dtype."""


class PinnedTableWriter:
    """Collects writes to rows of one device table until the next step. The last write to a row takes effect.

    Args:
        table: ``[rows, ...]`` on the device.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.values: dict[int, Any] = {}

    def put(self, row: int, value: Any) -> None:
        """Set one row of the table to ``value``, an array or sequence with the shape of a row."""
        self.values[row] = value


def flush_writers(writers: Iterable[PinnedTableWriter]) -> None:
    """Enqueue the writes to all tables on the current stream, behind the steps in flight, as one upload without a sync.

    Row numbers and values are put together in pinned memory. PyTorch's caching host allocator reuses it only after
    the copy.
    """
    waiting = [writer for writer in writers if writer.values]
    if not waiting:
        return
    places, size = [], 0
    for writer in waiting:
        count, table = len(writer.values), writer.table
        behind = size + _aligned(8 * count)
        places.append((size, behind))
        size = behind + _aligned(count * table[0].nbytes)
    device = waiting[0].table.device
    host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    for writer, place in zip(waiting, places, strict=True):
        rows, values = (part.numpy() for part in _views(host, writer, *place))
        rows[:] = np.fromiter(writer.values, np.int64, len(writer.values))
        given = list(writer.values.values())
        if isinstance(given[0], np.ndarray):
            np.stack(given, out=values)
        else:
            values[...] = given
    uploaded = host.to(device, non_blocking=True) if device.type == "cuda" else host
    for writer, place in zip(waiting, places, strict=True):
        writer.table.index_copy_(0, *_views(uploaded, writer, *place))
        writer.values.clear()


def _views(data: torch.Tensor, writer: PinnedTableWriter, rows: int, values: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row numbers and the values of a writer within an upload, given where they start."""
    count, table = len(writer.values), writer.table
    return (
        data[rows : rows + 8 * count].view(torch.int64),
        data[values : values + count * table[0].nbytes].view(table.dtype).view(count, *table.shape[1:]),
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
