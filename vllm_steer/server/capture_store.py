# SPDX-License-Identifier: Apache-2.0
"""What was too large for an answer, until it is fetched, deleted or too old: files that all API servers share.

A file's name is a hash of its unguessable id and of its owner: a listing of the folder gives no id away, no id is ever
a path, and somebody else's file is not found. Its modification time is when it expires. What is being written counts
in full from the start, and one budget holds for all processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal

from vllm_steer.fs.shared_tempdir import LOCK_FILES, SharedTempDir, shared_tempdir_path
from vllm_steer.metrics.collectors import set_gauge
from vllm_steer.server.auth.current_key import NO_OWNER

MediaKind = Literal["safetensors", "json"]
KINDS: tuple[MediaKind, ...] = ("safetensors", "json")
_PART = ".part"


class StoreFullError(RuntimeError):
    """It cannot be kept; the text says why, as the client may read it."""


@dataclass(frozen=True)
class StoreLimits:
    """What an operator sets."""

    inline_bytes: int
    """Rows up to this size are part of the answer."""
    budget_bytes: int
    """Most bytes that are kept at one time."""
    expiry_seconds: float
    """How long they are kept."""
    response_bytes: int = 1 << 40
    """Rows up to this size are part of one answer, all its choices together."""


@dataclass(frozen=True)
class Stored:
    """A file that was found, open for reading; whoever has it closes it."""

    file: BinaryIO
    size: int
    kind: MediaKind


class CaptureStore:
    """Bytes by id. All methods but :meth:`keep` may block on the disk; they are for any thread.

    ``name``: that of the folder, which processes with the same one share.
    """

    def __init__(self, limits: StoreLimits, name: str) -> None:
        self.limits = limits
        self._path = shared_tempdir_path(name)
        self._name = name
        self._spool: SharedTempDir | None = None

    def __len__(self) -> int:
        return sum(1 for _ in self._entries())

    def check_room(self, size: int) -> None:
        """Raise :class:`StoreFullError` unless ``size`` more bytes can be kept."""
        used = sum(status.st_size for _, status in self._entries())
        if used + size > self.limits.budget_bytes:
            raise StoreFullError(
                f"{size} bytes do not fit: {used} of {self.limits.budget_bytes} (--capture-store-mib) are taken by "
                "captures that were not deleted and have not expired"
            )

    def used_by(self, owner: bytes) -> tuple[int, float]:
        """Bytes that are kept for ``owner``, and the seconds until the first of them expire."""
        now = time.time()
        mine = [
            status
            for path, status in self._entries()
            if path.name.startswith(_mark(owner)) and (status.st_mtime > now or path.suffix == _PART)
        ]
        expires = min((status.st_mtime - now for status in mine), default=0.0)
        return sum(status.st_size for status in mine), max(expires, 0.0)

    def put(self, data: bytes, kind: MediaKind, owner: bytes = NO_OWNER, most: int | None = None) -> str:
        """Keep ``data`` for ``owner``, who may have ``most`` bytes; returns its id. Raises :class:`StoreFullError`."""
        handle = secrets.token_urlsafe(32)
        try:
            self._write(self._file(handle, kind, owner), data, owner, most)
        except OSError as error:
            raise StoreFullError(f"the server cannot keep {len(data)} bytes: {error.strerror or error}") from error
        return handle

    async def keep(self, data: bytes, kind: MediaKind, owner: bytes = NO_OWNER, most: int | None = None) -> str:
        """As :meth:`put`, for the event loop. What nobody waits for any more is not kept."""
        writing = asyncio.ensure_future(asyncio.to_thread(self.put, data, kind, owner, most))
        try:
            handle = await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(partial(self._forget, owner))
            raise
        loop = asyncio.get_running_loop()
        expired = self.limits.expiry_seconds + 0.01
        # In a context of its own: a timer keeps that of its maker, which has the request's rows, until it is due.
        loop.call_later(expired, loop.run_in_executor, None, self.sweep, context=Context())
        return handle

    def open(self, handle: str, owner: bytes = NO_OWNER) -> Stored | None:
        """What is kept for ``owner`` under ``handle``, if anything is."""
        for kind in KINDS:
            try:
                file = self._file(handle, kind, owner).open("rb")
            except FileNotFoundError:
                continue
            status = os.fstat(file.fileno())
            if status.st_mtime > time.time():
                return Stored(file, status.st_size, kind)
            file.close()
        return None

    def discard(self, handle: str, owner: bytes = NO_OWNER) -> bool:
        """Forget what is kept for ``owner`` under ``handle``; returns whether there was anything."""
        for kind in KINDS:
            try:
                self._file(handle, kind, owner).unlink()
            except FileNotFoundError:
                continue
            self.show()
            return True
        return False

    def sweep(self) -> None:
        """Remove what has expired, whichever process wrote it, and what a killed process left half written."""
        now = time.time()
        for path, status in self._entries():
            age = self.limits.expiry_seconds if path.suffix == _PART else 0
            if status.st_mtime + age <= now:
                path.unlink(missing_ok=True)
        self.show()

    def show(self) -> None:
        """Set the metrics to what is kept now."""
        set_gauge("store_bytes", sum(status.st_size for _, status in self._entries()))
        set_gauge("store_limit_bytes", self.limits.budget_bytes)

    def close(self) -> None:
        """At the end of the process: the last one to close removes the folder."""
        if self._spool is not None:
            self._spool.leave()
            self._spool = None

    def _write(self, path: Path, data: bytes, owner: bytes, most: int | None) -> None:
        spool = self._spool
        if spool is None or not spool.exists():
            self._spool = spool = SharedTempDir(self._name)
        part = path.with_suffix(_PART)
        with spool.locked():
            self.sweep()
            self.check_room(len(data))
            if most is not None and self.used_by(owner)[0] + len(data) > most:
                raise StoreFullError(
                    f"{len(data)} bytes do not fit: this key may keep {most} (--capture-key-store-mib)"
                )
            descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, len(data))
            except BaseException:
                os.close(descriptor)
                part.unlink(missing_ok=True)
                raise
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            expires = time.time() + self.limits.expiry_seconds
            os.utime(part, (expires, expires))
            with spool.locked():
                # Who counts meanwhile would find it under neither of its two names.
                part.rename(path)
            self.show()
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _entries(self) -> Iterator[tuple[Path, os.stat_result]]:
        try:
            paths = [path for path in self._path.iterdir() if path.name not in LOCK_FILES]
        except FileNotFoundError:
            return
        for path in paths:
            try:
                yield path, path.lstat()
            except FileNotFoundError:
                continue  # deleted or published meanwhile

    def _file(self, handle: str, kind: MediaKind, owner: bytes) -> Path:
        # Of a fixed length, whatever a client sends; half surrogate pairs too.
        name = hashlib.sha256(owner + handle.encode("utf-8", "surrogatepass")).hexdigest()
        return self._path / f"{_mark(owner)}{name}.{kind}"

    def _forget(self, owner: bytes, writing: asyncio.Future[str]) -> None:
        if not writing.cancelled() and writing.exception() is None:
            self.discard(writing.result(), owner)


def _mark(owner: bytes) -> str:
    """How the names of an owner's files begin."""
    return f"{hashlib.sha256(owner).hexdigest()[:32]}-"
