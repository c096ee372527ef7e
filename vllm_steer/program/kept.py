# SPDX-License-Identifier: Apache-2.0
"""Programs by their bytes, so that what was made or read once in a process is not decoded and checked again.

One request's bytes are looked at several times on their way (checks, scheduler, worker), many requests' are equal. An
object's hash is computed once, so a look at bytes that are at hand already costs nothing.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cachetools import LRUCache

if TYPE_CHECKING:
    from vllm_steer.program.program import Program

MOST_BYTES = 256 << 20


class KeptPrograms:
    """The programs used last, as many as take ``most_bytes`` in their encoded form; they take as much again decoded."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        # A small program takes more than its bytes.
        self._programs: LRUCache[bytes, tuple[Program, bool, int, bytes]] = LRUCache(
            most_bytes, getsizeof=lambda kept: kept[2]
        )
        self._lock = threading.Lock()

    def find(self, data: bytes, checked: bool) -> Program | None:
        """The program of ``data``, if it is kept, and has been checked where that is asked."""
        with self._lock:
            program, sound, _, _ = self._programs.get(data, (None, False, 0, data))
        return program if sound or not checked else None

    def same(self, data: bytes) -> bytes:
        """The bytes that are kept and equal ``data``; ``data`` itself where none are."""
        with self._lock:
            return self._programs.get(data, (None, False, 0, data))[3]

    def keep(self, data: bytes, program: Program, checked: bool) -> bytes:
        """Keep ``program``; it replaces one of the same bytes.

        Returns the bytes under which it is kept: looks at these compare nothing, at others equal to them every byte.
        """
        size = len(data) + 4096
        with self._lock:
            if size > self._programs.maxsize:
                return data
            key = self._programs.get(data, (program, checked, size, data))[3]
            self._programs[key] = (program, checked, size, key)
            return key


PROGRAMS = KeptPrograms()
