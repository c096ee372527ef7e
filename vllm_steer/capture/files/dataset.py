# SPDX-License-Identifier: Apache-2.0
"""Rows of one site of stored requests as a dataset of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from cachetools import LRUCache
from torch.utils.data import Dataset

from vllm_steer.capture.files.format import MIN_MAPPED_BYTES
from vllm_steer.capture.results import raise_unknown_site

if TYPE_CHECKING:
    from vllm_steer.capture.files.reader import StoredRequest

_MAX_CACHED_BYTES = 1 << 28
_OVERHEAD = 2048
"""Approximate size in bytes of the objects of a mapped tensor."""


class RowDataset(Dataset[torch.Tensor]):
    """Rows of one site, one item per row ``[width]``: request by request, and by position within a request.

    A map-style dataset: ``DataLoader(rows, batch_size=512, shuffle=True)`` draws rows of all requests in random order.
    It can be pickled, for workers that are started by ``spawn``; each process maps the files itself.
    """

    def __init__(self, requests: Sequence[StoredRequest], point: str, layer: int) -> None:
        """Count the rows; only properties are read.

        Args:
            requests: Stored requests; those that did not capture the site are skipped.
            point: Hook point of the site.
            layer: Layer of the site.

        Raises:
            KeyError: No request captured the site.
            ValueError: The rows differ in width or dtype.
        """
        self.site = point, layer
        numbers: list[int] = []
        counts: list[int] = []
        known: dict[tuple[str, int], Any] = {}
        first: tuple[int, torch.dtype] | None = None
        for number, request in enumerate(requests):
            known.update(dict.fromkeys(request.sites))
            if self.site not in request.sites:
                continue
            count, width, dtype = request.shape(point, layer)
            first = first or (width, dtype)
            if (width, dtype) != first:
                raise ValueError(
                    f"{point}[{layer}] of {request.request_id!r} has rows of {width} x {dtype}, earlier requests have "
                    f"{first[0]} x {first[1]}; choose a run"
                )
            numbers.append(number)
            counts.append(count)
        if first is None:
            raise_unknown_site(point, layer, known)
        self._requests = requests
        self._numbers = np.array(numbers, np.int64)
        self._ends = np.cumsum(np.array(counts, np.int64))
        self._cache = _new_cache()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cache": _new_cache()}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a copy of one row."""
        place, row = self._find(index)
        rows = self._cache.get(place)
        if rows is None:
            rows = self._cache[place] = self._requests[int(self._numbers[place])].tensor(*self.site)
        return rows[row].clone()

    @property
    def request_index(self) -> torch.Tensor:
        """The place of each row's request among the captures, int64 ``[rows]``, for instance to attach labels."""
        return torch.from_numpy(np.repeat(self._numbers, np.diff(self._ends, prepend=0)))

    def _find(self, index: int) -> tuple[int, int]:
        """Return the place of a row's request, and the number of the row in it."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        place = int(np.searchsorted(self._ends, index, side="right"))
        return place, index - (int(self._ends[place - 1]) if place else 0)


def _new_cache() -> LRUCache[int, torch.Tensor]:
    return LRUCache(_MAX_CACHED_BYTES, getsizeof=_cached_size)


def _cached_size(rows: torch.Tensor) -> int:
    return _OVERHEAD + (rows.nbytes if rows.nbytes < MIN_MAPPED_BYTES else 0)
