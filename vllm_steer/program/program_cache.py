# SPDX-License-Identifier: Apache-2.0
"""Cache of decoded programs by their bytes.

A request's bytes are inspected several times on their way (front-end check, scheduler, worker), and many requests have
equal bytes. Entries are found by a small part of the bytes, which contains the digests of all vectors, and are then
compared in full: hashing all bytes would take more than twice as long, once for every request.
"""

from __future__ import annotations

import threading
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from cachetools import LRUCache

from vllm_steer.request.vector import content_digest

P = TypeVar("P")
CacheKey: TypeAlias = tuple[int, bytes, bytes]

MAX_BYTES = 256 << 20

_HEAD_BYTES, _TAIL_BYTES = 1 << 14, 256
"""The head holds the edits and digests of about 180 sites. Longer programs with an equal head replace each other."""
_MAX_KEYED_BYTES = 32 << 20
"""Total size of the bytes objects whose cache keys are remembered."""
_ENTRY_OVERHEAD = 4096
"""Approximate size in bytes of a decoded program beside its encoded bytes."""


class _CacheKeys:
    """The cache keys of the bytes objects seen last, by object identity.

    The objects are held, so their ids are not reused.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, CacheKey]] = {}
        self._size = 0

    def get(self, data: bytes) -> CacheKey:
        """Return the cache key of ``data``."""
        known = self._known.get(id(data))
        if known is not None and known[0] is data:
            return known[1]
        if self._size > _MAX_KEYED_BYTES:
            # A new dict: another thread may still be adding to this one, and its objects must outlive their ids.
            self._known, self._size = {}, 0
        # A digest of the head: a slice would hold a copy of the head as long as the program.
        key = len(data), content_digest(memoryview(data)[:_HEAD_BYTES]), data[-_TAIL_BYTES:]
        self._known[id(data)] = data, key
        self._size += _entry_size(data)
        return key


_KEYS = _CacheKeys()


def cache_key(data: bytes) -> CacheKey:
    """Return the key under which ``data`` is cached; different bytes may have equal keys."""
    return _KEYS.get(data)


class CachedProgram(NamedTuple, Generic[P]):
    """A decoded program and the bytes that it was decoded from."""

    program: P
    verified: bool
    """Whether the numbers and digests have been verified."""
    data: bytes


class ProgramCache(Generic[P]):
    """Thread-safe LRU cache of programs, bounded by the size of their encoded bytes."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._programs: LRUCache[CacheKey, CachedProgram[P]] = LRUCache(
            max_bytes, getsizeof=lambda cached: _entry_size(cached.data)
        )
        self._lock = threading.Lock()
        self._latest: CachedProgram[P] | None = None
        """The entry found last: a request looks for the same bytes several times in a row."""

    def get(self, data: bytes) -> CachedProgram[P] | None:
        """Return the entry of ``data``, or None."""
        latest = self._latest
        if latest is not None and latest.data is data:
            return latest
        with self._lock:
            cached: CachedProgram[P] | None = self._programs.get(cache_key(data))
            if cached is None or cached.data != data:
                return None
            self._latest = cached
        return cached

    def put(self, cached: CachedProgram[P]) -> CachedProgram[P]:
        """Add or replace an entry and return it."""
        if _entry_size(cached.data) <= self._programs.maxsize:
            with self._lock:
                self._programs[cache_key(cached.data)] = self._latest = cached
        return cached


def _entry_size(data: bytes) -> int:
    return len(data) + _ENTRY_OVERHEAD
