# SPDX-License-Identifier: Apache-2.0
"""The distinct vectors of a program while it is compiled, joined or bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_steer.request import Projection, content_digest
from vllm_steer.request.vector import width_error


class VectorTable:
    """Distinct vectors of one width by digest, with the index and the float32 bytes of each.

    Args:
        width: Width of the vectors; 0 if the first vector decides.
        source: Path of the field that has decided about the width.
    """

    def __init__(self, width: int = 0, source: str = "") -> None:
        self.width, self._source = width, source
        self._entries: dict[bytes, tuple[int, bytes | memoryview]] = {}
        self.digests: list[bytes] = []

    def add(self, data: bytes | memoryview, source: str, digest: bytes | None = None) -> int:
        """Return the index of a vector; add it if it is new.

        Raises:
            SteeringError: For ``source``, if the vector has another width than those before.
        """
        width = len(data) // 4
        if width != self.width:
            if self.width:
                raise width_error(source, width, self._source, self.width)
            self.width, self._source = width, source
        if digest is None:
            digest = content_digest(data)
        index, _ = self._entries.setdefault(digest, (len(self.digests), data))
        if index == len(self.digests):
            self.digests.append(digest)
        return index

    def add_rows(self, rows: npt.NDArray[np.float32], source: str) -> tuple[int, ...]:
        """Return the indices of the rows of a matrix; see :meth:`add`."""
        return tuple(self.add(row.tobytes(), source) for row in np.ascontiguousarray(rows, "<f4"))

    def add_directions(self, projection: Projection, source: str) -> tuple[int, ...]:
        """Return the indices of the directions of a projection; see :meth:`add`."""
        pairs = zip(projection.vectors, projection.digests, strict=True)
        return tuple(self.add(data, source, digest) for data, digest in pairs)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a program that hold its vectors."""
        vectors = tuple(memoryview(data) for _, data in self._entries.values())
        return {"width": self.width, "digests": tuple(self.digests), "vectors": vectors}
