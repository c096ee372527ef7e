# SPDX-License-Identifier: Apache-2.0
"""Large programs on their way to the engine's process: of equal ones, the bytes cross once.

Most requests bring the vectors that others have brought: a module's, a probe's, those of one experiment. vLLM's socket
would carry them for each request anew, 1.5 MiB where all sites of an 8B model are edited, copied at both ends. So the
front end puts a program that it sends for the second time into a file, and sends the file's name and the program's
digest from then on; the scheduler reads a file once. Both are processes of one host that one user owns.

A file stays until others need its room, and for :data:`RESTS` at least after it was last sent for: the scheduler reads
it as soon as the request arrives. The folder is its owner's alone, and goes with the process, or with the next one of
that user where this one was killed (:mod:`vllm_steer.fs.shared_tempdir`).
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
from vllm_steer.program.program_cache import PROGRAMS, CacheKey, cache_key

logger = steering_logger(__name__)

LARGE = 32 << 10
"""Bytes from which a program is worth a file."""
MOST_BYTES = 128 << 20
"""Of all files of one front end."""
RESTS = 600.0
"""Seconds."""
_MOST_SEEN = 4096
_FIELD = "extra_args.steer_file"


class ProgramRef(msgspec.Struct, frozen=True, array_like=True):
    """What is sent in a program's place."""

    path: str
    size: int
    digest: bytes


@dataclass
class _Shelved:
    data: bytes
    path: Path
    ticket: bytes
    sent: float


class ProgramFileCache:
    """The front end's side; its files are there until :meth:`close`."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._spool: SharedTempDir | None = None
        self._shelved: OrderedDict[CacheKey, _Shelved] = OrderedDict()
        self._size = 0
        self._seen: LRUCache[int, bool] = LRUCache(_MOST_SEEN)
        self._lock = threading.Lock()
        self._closed = False

    def ticket(self, data: bytes) -> bytes | None:
        """What to send in the place of ``data``; None where that is to be sent itself: it is small, it is new, or there
        is no room."""
        if len(data) < LARGE:
            return None
        with self._lock:
            place = cache_key(data)
            there = self._shelved.get(place)
            if there is not None and not _is_whole(there):
                # Somebody tidied up.
                self._forget(place)
                there = None
            if there is None or there.data != data:
                there = self._put(place, data)
            if there is None:
                return None
            there.sent = time.monotonic()
            self._shelved.move_to_end(place)
            return there.ticket

    def close(self) -> None:
        """Remove the files; from now on everything is sent itself."""
        with self._lock:
            self._closed = True
            self._shelved.clear()
            if self._spool is not None:
                self._spool.leave()

    def _put(self, place: CacheKey, data: bytes) -> _Shelved | None:
        key = hash(place)
        if self._closed or key not in self._seen:
            self._seen[key] = True
            return None
        # Of two with the same place the first stays, as long as it may be waited for.
        if place in self._shelved or not self._make_room(len(data)):
            return None
        try:
            if self._spool is None:
                self._spool = SharedTempDir(secrets.token_hex(16))
            with tempfile.NamedTemporaryFile(dir=self._spool.path, delete=False) as file:
                file.write(data)
        except OSError as error:
            logger.warning("Equal programs are sent with every request that has them: %s", error)
            self._closed = True
            return None
        path = Path(file.name)
        ticket = msgspec.msgpack.encode(ProgramRef(file.name, len(data), _digest(data)))
        self._size += len(data)
        self._shelved[place] = _Shelved(data, path, ticket, time.monotonic())
        return self._shelved[place]

    def _make_room(self, size: int) -> bool:
        while self._size + size > self._most_bytes:
            place, oldest = next(iter(self._shelved.items()), (None, None))
            if place is None or oldest is None or time.monotonic() - oldest.sent < RESTS:
                return False
            self._forget(place)
        return True

    def _forget(self, place: CacheKey) -> None:
        gone = self._shelved.pop(place)
        self._size -= len(gone.data)
        gone.path.unlink(missing_ok=True)


_fetched: LRUCache[bytes, bytes] = LRUCache(MOST_BYTES, getsizeof=len)


def fetch(ticket: Any) -> bytes:
    """The program that a ticket stands for, in the engine's process; of equal ones one object.

    Raises :class:`SteeringError`: this is no ticket, or its file is not there, or is not what was put there.
    """
    known: bytes | None = _fetched.get(ticket) if isinstance(ticket, bytes) else None
    if known is not None:
        return known
    try:
        wanted = msgspec.msgpack.decode(ticket, type=ProgramRef)
        data = Path(wanted.path).read_bytes()
    except (msgspec.MsgspecError, OSError, TypeError, ValueError) as error:
        # No path: this text reaches clients.
        reason = getattr(error, "strerror", None) or "no file of ours"
        raise SteeringError(_FIELD, f"the program could not be read ({reason}); send it again") from None
    if len(data) != wanted.size or _digest(data) != wanted.digest:
        raise SteeringError(_FIELD, "the program's file has changed; send it again, or restart the server")
    kept = PROGRAMS.find(data)
    data = data if kept is None else kept.data
    if len(data) <= _fetched.maxsize:
        _fetched[ticket] = data
    return data


def _is_whole(shelved: _Shelved) -> bool:
    try:
        return shelved.path.stat().st_size == len(shelved.data)
    except OSError:
        return False


def _digest(data: bytes) -> bytes:
    return blake3(data).digest()
