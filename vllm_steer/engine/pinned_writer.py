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
        self.row_shape = table.shape[1:]
        self.row_bytes = table.dtype.itemsize * self.row_shape.numel()
        self.dtype = torch.empty(0, dtype=table.dtype).numpy().dtype
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
        count = len(writer.values)
        behind = size + _aligned(8 * count)
        places.append((count, size, behind))
        size = behind + _aligned(count * writer.row_bytes)
    device = waiting[0].table.device
    host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    data = host.numpy()
    for writer, (count, first, behind) in zip(waiting, places, strict=True):
        data[first : first + 8 * count].view(np.int64)[:] = list(writer.values)
        values = data[behind : behind + count * writer.row_bytes].view(writer.dtype).reshape(count, *writer.row_shape)
        given = list(writer.values.values())
        if isinstance(given[0], np.ndarray):
            np.stack(given, out=values)
        else:
            values[...] = given
    uploaded = host.to(device, non_blocking=True) if device.type == "cuda" else host
    for writer, (count, first, behind) in zip(waiting, places, strict=True):
        rows = uploaded[first : first + 8 * count].view(torch.int64)
        values_of_rows = uploaded[behind : behind + count * writer.row_bytes].view(writer.table.dtype)
        writer.table.index_copy_(0, rows, values_of_rows.view(count, *writer.row_shape))
        writer.values.clear()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
