# SPDX-License-Identifier: Apache-2.0
"""Files that carry large programs from the front end to the engine's process.

Many requests have equal vectors, for example from one module or one experiment. vLLM's socket would send them with
every request (1.5 MiB for all sites of an 8B model) and copy them at both ends. Instead, the front end writes a program
that it sends for the second time to a file and from then on sends a :class:`ProgramRef` to it. The scheduler reads
each file once. Both processes run on one host under one user.

A file is removed when others need its space, but not until :data:`MIN_FILE_AGE` seconds after its last reference was
sent: the scheduler reads it when the request arrives. The directory is private to its owner. It is removed with the
process, or by the user's next process if this one was killed (:mod:`vllm_steer.fs.shared_tempdir`).
"""

from __future__ import annotations

import secrets
import tempfile
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3
from cachetools import LRUCache

from vllm_steer.errors import SteeringError
from vllm_steer.fs.shared_tempdir import SharedTempDir
from vllm_steer.log import steering_logger
from vllm_steer.program.program import PROGRAM_CACHE
from vllm_steer.program.program_cache import CacheKey, cache_key

logger = steering_logger(__name__)

MIN_PROGRAM_BYTES = 32 << 10
"""Smallest program that is written to a file."""
MAX_BYTES = 128 << 20
"""Total size of the files of one front end."""
MIN_FILE_AGE = 600.0
"""Seconds for which a file is kept after its last reference was sent."""
_MAX_SEEN = 4096
_FIELD = "extra_args.steer_file"


class ProgramRef(msgspec.Struct, frozen=True, array_like=True):
    """Reference to a program in a file, sent instead of the program."""

    path: str
    size: int
    digest: bytes


@dataclass
class _ProgramFile:
    data: bytes
    path: Path
    reference: bytes
    last_sent: float

    def is_intact(self) -> bool:
        try:
            return self.path.stat().st_size == len(self.data)
        except OSError:
            return False


class ProgramFileCache:
    """Files of the programs that one front end sends; they exist until :meth:`close`. Thread-safe."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._directory: SharedTempDir | None = None
        self._files: OrderedDict[CacheKey, _ProgramFile] = OrderedDict()
        self._size = 0
        self._seen: LRUCache[int, bool] = LRUCache(_MAX_SEEN)
        self._lock = threading.Lock()
        self._closed = False

    def reference(self, data: bytes) -> bytes | None:
        """Return a reference to send instead of ``data``.

        Returns:
            An encoded :class:`ProgramRef`, or None if ``data`` itself must be sent: it is small, it has not been sent
            before, or no space is left for a file.
        """
        if len(data) < MIN_PROGRAM_BYTES:
            return None
        with self._lock:
            key = cache_key(data)
            file = self._files.get(key)
            if file is not None and not file.is_intact():
                # Another process, such as a cleaner of /tmp, removed or changed the file.
                self._remove(key)
                file = None
            if file is None or file.data != data:
                file = self._add(key, data)
            if file is None:
                return None
            file.last_sent = time.monotonic()
            self._files.move_to_end(key)
            return file.reference

    def close(self) -> None:
        """Remove the files; :meth:`reference` returns None from now on."""
        with self._lock:
            self._closed = True
            self._files.clear()
            if self._directory is not None:
                self._directory.leave()

    def _add(self, key: CacheKey, data: bytes) -> _ProgramFile | None:
        seen_key = hash(key)
        if self._closed or seen_key not in self._seen:
            self._seen[seen_key] = True
            return None
        # The file of another program with the same key stays: the scheduler may not have read it yet.
        if key in self._files or not self._make_space(len(data)):
            return None
        try:
            if self._directory is None:
                self._directory = SharedTempDir(secrets.token_hex(16))
            with tempfile.NamedTemporaryFile(dir=self._directory.path, delete=False) as file:
                file.write(data)
        except OSError as error:
            logger.warning("Cannot write program files; programs are sent with every request: %s", error)
            self._closed = True
            return None
        reference = msgspec.msgpack.encode(ProgramRef(file.name, len(data), _digest(data)))
        self._size += len(data)
        self._files[key] = _ProgramFile(data, Path(file.name), reference, time.monotonic())
        return self._files[key]

    def _make_space(self, size: int) -> bool:
        while self._size + size > self._max_bytes:
            key, oldest = next(iter(self._files.items()), (None, None))
            if key is None or oldest is None or time.monotonic() - oldest.last_sent < MIN_FILE_AGE:
                return False
            self._remove(key)
        return True

    def _remove(self, key: CacheKey) -> None:
        file = self._files.pop(key)
        self._size -= len(file.data)
        file.path.unlink(missing_ok=True)


_fetched: LRUCache[bytes, bytes] = LRUCache(MAX_BYTES, getsizeof=len)


def fetch_program(reference: Any) -> bytes:
    """Read a referenced program, in the engine's process; equal programs share one bytes object.

    Raises:
        SteeringError: ``reference`` is not a :class:`ProgramRef`, or its file is missing or has changed.
    """
    known: bytes | None = _fetched.get(reference) if isinstance(reference, bytes) else None
    if known is not None:
        return known
    try:
        ref = msgspec.msgpack.decode(reference, type=ProgramRef)
        data = Path(ref.path).read_bytes()
    except (msgspec.MsgspecError, OSError, TypeError, ValueError) as error:
        # The message reaches clients, so it does not contain the path.
        reason = getattr(error, "strerror", None) or "not a program reference"
        raise SteeringError(_FIELD, f"cannot read the program ({reason}); send it again") from None
    if len(data) != ref.size or _digest(data) != ref.digest:
        raise SteeringError(_FIELD, "the program's file has changed; send it again, or restart the server")
    cached = PROGRAM_CACHE.get(data)
    data = data if cached is None else cached.data
    if len(data) <= _fetched.maxsize:
        _fetched[reference] = data
    return data


def _digest(data: bytes) -> bytes:
    return blake3(data).digest()
