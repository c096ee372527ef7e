# SPDX-License-Identifier: Apache-2.0
"""Batched writes to rows of a device table."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class PinnedTableWriter:
    """Collects writes to rows of one device table until the next step. The last write to a row takes effect.

    Args:
        table: ``[rows, ...]`` on the device.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        self._values: dict[int, Any] = {}

    def put(self, row: int, value: Any) -> None:
        """Set one row of the table to ``value``, an array or sequence with the shape of a row."""
        self._values[row] = value

    def flush(self) -> None:
        """Enqueue the writes on the current stream, behind the steps in flight, as two uploads."""
        if not self._values:
            return
        rows = self._upload([np.fromiter(self._values, np.int64, len(self._values))], torch.int64)[0]
        self._table.index_copy_(0, rows, self._upload(list(self._values.values()), self._table.dtype))
        self._values.clear()

    def _upload(self, values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        """Copy values to the device without a sync.

        Values are stacked in pinned memory. PyTorch's caching host allocator reuses it only after the copy.
        """
        pinned = self._table.device.type == "cuda"
        tensor = torch.empty((len(values), *np.shape(values[0])), dtype=dtype, device="cpu", pin_memory=pinned)
        if isinstance(values[0], np.ndarray):
            np.stack(values, out=tensor.numpy())
        else:
            tensor.numpy()[...] = values
        return tensor.to(self._table.device, non_blocking=True) if pinned else tensor
