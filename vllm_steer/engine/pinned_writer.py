# SPDX-License-Identifier: Apache-2.0
"""Writes to a device table, collected while requests come and go and made before the next step: two uploads a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class PinnedTableWriter:
    """Rows of one table ``[places, ...]`` by place; of several values for one place the last counts."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        self._values: dict[int, Any] = {}

    def put(self, place: int, value: Any) -> None:
        """``value``: an array or sequence of the shape of one row of the table."""
        self._values[place] = value

    def flush(self) -> None:
        """Enqueue the writes on the current stream, so that a step still in flight does not see them."""
        if not self._values:
            return
        places = self._upload([np.fromiter(self._values, np.int64, len(self._values))], torch.int64)[0]
        self._table.index_copy_(0, places, self._upload(list(self._values.values()), self._table.dtype))
        self._values.clear()

    def _upload(self, values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        """Host to device without a sync: pinned memory comes from torch's caching host allocator, which keeps a block
        until the copy out of it has run. Values are put there at once: those of vectors are many bytes."""
        pinned = self._table.device.type == "cuda"
        tensor = torch.empty((len(values), *np.shape(values[0])), dtype=dtype, device="cpu", pin_memory=pinned)
        if isinstance(values[0], np.ndarray):
            np.stack(values, out=tensor.numpy())
        else:
            tensor.numpy()[...] = values
        return tensor.to(self._table.device, non_blocking=True) if pinned else tensor
