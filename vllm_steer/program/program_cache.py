# SPDX-License-Identifier: Apache-2.0
"""Programs by their bytes, so that what was made or read once in a process is not decoded and checked again.

One request's bytes are looked at several times on their way (checks, scheduler, worker), many requests' are equal. They
are found by a few of their bytes, the digests of all vectors among them, and compared whole: a hash of all takes more
than twice as long as that, and would be taken anew for each request.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from cachetools import LRUCache

from vllm_steer.spec.vector import content_digest

if TYPE_CHECKING:
    from vllm_steer.program.program import Program

MOST_BYTES = 256 << 20


_HEAD, _TAIL = 1 << 14, 256
"""Edits and digests of some 180 sites stand in the head; longer programs, equal there, take each other's place."""
CacheKey: TypeAlias = tuple[int, bytes, bytes]


_MOST_LOOKED_AT = 32 << 20
"""Bytes of the objects whose places are known."""


class _Places:
    """The place of each bytes object looked at last: one is looked at several times on a request's way, and those of a
    module or of named probes are one object for all requests. The objects are held, so that none takes another's id."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, CacheKey]] = {}
        self._size = 0

    def of(self, data: bytes) -> CacheKey:
        known = self._known.get(id(data))
        if known is not None and known[0] is data:
            return known[1]
        if self._size > _MOST_LOOKED_AT:
            # A new one: another thread may be adding to this one, whose objects must not go before their ids do.
            self._known, self._size = {}, 0
        # The head's digest: the head itself would be held as long as the program, beside it.
        place = len(data), content_digest(memoryview(data)[:_HEAD]), data[-_TAIL:]
        self._known[id(data)] = data, place
        self._size += _size(data)
        return place


_PLACES = _Places()


def cache_key(data: bytes) -> CacheKey:
    """Where bytes are kept; of others with the same place, those that came last.

    One object for equal places of one bytes object, whose parts remember their hashes."""
    return _PLACES.of(data)


class CachedProgram(NamedTuple):
    """A program, and the bytes that it was decoded from: looks at these compare nothing, at others equal to them every
    byte. ``checked``: whether digests and numbers have been looked at too."""

    program: Program
    checked: bool
    data: bytes


class ProgramCache:
    """The programs used last, as many as take ``most_bytes`` in their encoded form, in which their vectors stand."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._programs: LRUCache[CacheKey, CachedProgram] = LRUCache(
            most_bytes, getsizeof=lambda kept: _size(kept.data)
        )
        self._lock = threading.Lock()

    def find(self, data: bytes) -> CachedProgram | None:
        """What is kept of ``data``."""
        with self._lock:
            kept: CachedProgram | None = self._programs.get(cache_key(data))
        return kept if kept is not None and kept.data == data else None

    def keep(self, kept: CachedProgram) -> CachedProgram:
        """Keep it, in the place of one of the same bytes."""
        if _size(kept.data) <= self._programs.maxsize:
            with self._lock:
                self._programs[cache_key(kept.data)] = kept
        return kept


def _size(data: bytes) -> int:
    # A small program takes more than its bytes.
    return len(data) + 4096


PROGRAMS = ProgramCache()
