# SPDX-License-Identifier: Apache-2.0
"""Batched writes to rows of device tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

_ALIGNMENT = 16
"""Bytes to which each part of an upload is aligned, so that it can be viewed in any dtype."""


class PinnedTableWriter:
    """Collects writes to rows of one device table until the next step. The last write to a row takes effect.

    Args:
        table: ``[rows, ...]`` on the device, contiguous, with rows of a multiple of 4 bytes.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.row_shape = table.shape[1:]
        self.row_bytes = table.dtype.itemsize * self.row_shape.numel()
        self.dtype = torch.empty(0, dtype=table.dtype).numpy().dtype
        self.values: dict[int, Any] = {}

    def put(self, row: int, value: Any) -> None:
        """Set one row of the table to ``value``, an array or sequence with the shape of a row.

        Raises:
            IndexError: The table has no such row. The kernel that writes it does not look.
        """
        if not 0 <= row < self.table.shape[0]:
            raise IndexError(f"row {row} is outside the table of {self.table.shape[0]} rows")
        self.values[row] = value

    def stack(self, out: Any) -> None:
        """Copy the waiting values to an array, ``[waiting, ...]``."""
        given = list(self.values.values())
        if isinstance(given[0], np.ndarray):
            np.stack(given, out=out)
        else:
            out[...] = given


def flush_writers(writers: Iterable[PinnedTableWriter]) -> None:
    """Enqueue the writes to all tables on the current stream, behind the steps in flight, without a sync."""
    waiting = [writer for writer in writers if writer.values]
    if not waiting:
        return
    if (device := waiting[0].table.device).type == "cuda":
        from vllm_steer.taps.row_write_kernel import launch_writes

        # PyTorch's caching host allocator reuses pinned memory only after the copy.
        upload, count = pack_writes(waiting, pinned=True)
        launch_writes(upload.to(device, non_blocking=True), count)
    else:
        for writer in waiting:
            values = np.empty((len(writer.values), *writer.row_shape), writer.dtype)
            writer.stack(values)
            writer.table[list(writer.values)] = torch.from_numpy(values)
    for writer in waiting:
        writer.values.clear()


def pack_writes(waiting: Sequence[PinnedTableWriter], *, pinned: bool) -> tuple[torch.Tensor, int]:
    """Return the upload of :func:`vllm_steer.taps.row_write_kernel.launch_writes`, and the number of its writes."""
    from vllm_steer.taps.row_write_kernel import WORD_BYTES, WRITE_FIELDS

    count = sum(len(writer.values) for writer in waiting)
    places, size = [], _aligned(8 * WRITE_FIELDS * count)
    for writer in waiting:
        places.append(size)
        size += _aligned(len(writer.values) * writer.row_bytes)
    host = torch.empty(size // 8, dtype=torch.int64, device="cpu", pin_memory=pinned)
    numbers = host.numpy()
    data = numbers.view(np.uint8)
    writes = numbers[: WRITE_FIELDS * count].reshape(count, WRITE_FIELDS)
    first = 0
    for writer, place in zip(waiting, places, strict=True):
        own = writes[first : first + len(writer.values)]
        first += len(own)
        words = writer.row_bytes // WORD_BYTES
        own[:, 0] = list(writer.values)
        own[:, 0] *= writer.row_bytes
        own[:, 0] += writer.table.data_ptr()
        own[:, 1] = np.arange(place // WORD_BYTES, place // WORD_BYTES + words * len(own), words)
        own[:, 2] = words
        values = data[place : place + len(own) * writer.row_bytes].view(writer.dtype)
        writer.stack(values.reshape(len(own), *writer.row_shape))
    return host, count


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
