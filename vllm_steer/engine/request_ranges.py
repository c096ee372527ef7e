# SPDX-License-Identifier: Apache-2.0
"""Ranges of positions of running requests, as arrays over request slots."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_steer.taps.tables import OPEN_END


class RequestRanges:
    """A range of positions ``[low, high)`` per request slot, empty by default. Kept on the host for whole batches."""

    def __init__(self, num_slots: int) -> None:
        self._low = np.full(num_slots, OPEN_END, dtype=np.int64)
        self._high = np.zeros(num_slots, dtype=np.int64)

    def set(self, slot: int, low: int, high: int) -> None:
        self._low[slot], self._high[slot] = low, high

    def clear(self, slot: int) -> None:
        self.set(slot, OPEN_END, 0)

    def overlap(
        self, slot: npt.NDArray[np.int64], first: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Return for each request whether the positions ``[first, stop)`` overlap its range."""
        overlap: npt.NDArray[np.bool_] = (stop > self._low[slot]) & (first < self._high[slot])
        return overlap
