# SPDX-License-Identifier: Apache-2.0
"""Writes to a device table, collected while requests come and go and made before the next step: two uploads a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class Staged:
    """Rows of one table ``[places, ...]`` by place; of several values for one place the last counts."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        self._dtype = torch.empty(0, dtype=table.dtype).numpy().dtype
        self._values: dict[int, Any] = {}

    def put(self, place: int, value: Any) -> None:
        """``value``: an array or sequence of the shape of one row of the table."""
        self._values[place] = value

    def flush(self) -> None:
        """Enqueue the writes on the current stream, so that a step still in flight does not see them."""
        if not self._values:
            return
        places = np.fromiter(self._values, np.int64, len(self._values))
        values = np.array(list(self._values.values()), dtype=self._dtype)
        self._table.index_copy_(0, self._upload(places), self._upload(values))
        self._values.clear()

    def _upload(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """Host to device without a sync: pinned memory comes from torch's caching host allocator, which keeps a block
        until the copy out of it has run."""
        tensor = torch.from_numpy(values)
        if self._table.device.type == "cuda":
            return tensor.pin_memory().to(self._table.device, non_blocking=True)
        return tensor
