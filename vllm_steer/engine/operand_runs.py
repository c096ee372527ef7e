# SPDX-License-Identifier: Apache-2.0
"""Runs of operands in the device table ``operand``: contiguous, placed one behind the other.

Admission counts operands only, so a run that fits by count must find contiguous room. When the end of the table is
reached, all runs move to its start.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from vllm_steer.taps.tables import upload

Operands = npt.NDArray[np.int32]


class OperandRuns:
    """Runs of operands by key. The table on the device changes when :meth:`flush` is called."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        self._host = np.zeros(table.shape[0], np.int32)
        # Start and operands of each run, in ascending order of their starts.
        self._runs: dict[bytes, tuple[int, Operands]] = {}
        self._end = 0
        # Range of the table that changed since the last flush.
        self._low, self._high = table.shape[0], 0

    def start_of(self, key: bytes) -> int:
        """Return the first place of a run."""
        return self._runs[key][0]

    def add(self, key: bytes, operands: Operands) -> bool:
        """Place a run. Return whether other runs have moved.

        Raises:
            MemoryError: The operands do not fit; admission must not let the request run.
        """
        moved = self._end + len(operands) > len(self._host)
        if moved:
            self._compact()
        if self._end + len(operands) > len(self._host):
            raise MemoryError("the table of operands is full; admission must not let this request run")
        self._put(key, operands)
        return moved

    def remove(self, key: bytes) -> None:
        """Free the places of a run."""
        del self._runs[key]
        if not self._runs:
            self._end = 0

    def flush(self) -> None:
        """Enqueue the changes on the current stream, behind the steps in flight."""
        if self._low >= self._high:
            return
        changed = torch.from_numpy(self._host[self._low : self._high].copy())
        self._table[self._low : self._high].copy_(upload(changed, self._table.device))
        self._low, self._high = len(self._host), 0

    def _compact(self) -> None:
        runs, self._runs, self._end = self._runs, {}, 0
        for key, (_, operands) in runs.items():
            self._put(key, operands)

    def _put(self, key: bytes, operands: Operands) -> None:
        start, self._end = self._end, self._end + len(operands)
        self._host[start : self._end] = operands
        self._runs[key] = start, operands
        self._low, self._high = min(self._low, start), max(self._high, self._end)
