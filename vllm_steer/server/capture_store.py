# SPDX-License-Identifier: Apache-2.0
"""Store for captures that are too large for a response: temporary files shared by all API server processes.

A file's name is a hash of its random id and of its owner. A directory listing therefore reveals no id, an id is never
used as a path, and other owners' files are not found. A file's modification time is its expiry time. The byte budget
holds for all processes together and includes files that are still being written.
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

CaptureFormat = Literal["safetensors", "json"]
FORMATS: tuple[CaptureFormat, ...] = ("safetensors", "json")
_PART = ".part"


class StoreFullError(RuntimeError):
    """Raised when a capture cannot be stored. The message is shown to the client."""


@dataclass(frozen=True)
class StoreLimits:
    """Limits from the server's flags."""

    inline_bytes: int
    """Largest captured rows of one choice that are part of a response."""
    budget_bytes: int
    """Total size of all stored captures."""
    expiry_seconds: float
    """Lifetime of a stored capture."""
    response_bytes: int = 1 << 40
    """Largest captured rows of all choices together that are part of one response."""


@dataclass(frozen=True)
class StoredCapture:
    """An open file of the store. The caller closes it."""

    file: BinaryIO
    size: int
    format: CaptureFormat


class CaptureStore:
    """Captures by id. Thread-safe. All methods except :meth:`put_async` may block on the disk."""

    def __init__(self, limits: StoreLimits, name: str) -> None:
        """Create a view of the store.

        Args:
            limits: Limits of the store.
            name: Name of its folder; processes that use the same name share the store.
        """
        self.limits = limits
        self._path = shared_tempdir_path(name)
        self._name = name
        self._folder: SharedTempDir | None = None

    def __len__(self) -> int:
        return sum(1 for _ in self._files())

    def check_room(self, size: int) -> None:
        """Raise ``StoreFullError`` if ``size`` more bytes would exceed the budget."""
        used = self._used_bytes()
        if used + size > self.limits.budget_bytes:
            raise StoreFullError(
                f"no room for {size} bytes: other captures use {used} of {self.limits.budget_bytes} bytes; "
                "delete some, wait for their expiry, or raise --capture-store-mib"
            )

    def usage(self, owner: bytes) -> tuple[int, float]:
        """Return the bytes stored for ``owner``, and the seconds until the first of its captures expires."""
        now = time.time()
        mine = [
            status
            for path, status in self._files()
            if path.name.startswith(_owner_prefix(owner)) and (status.st_mtime > now or path.suffix == _PART)
        ]
        expires = min((status.st_mtime - now for status in mine), default=0.0)
        return sum(status.st_size for status in mine), max(expires, 0.0)

    def put(
        self, data: bytes, file_format: CaptureFormat, owner: bytes = NO_OWNER, owner_limit: int | None = None
    ) -> str:
        """Store ``data``.

        Args:
            data: Content of the file.
            file_format: Format of ``data``.
            owner: Owner, the only one who can open or delete the capture.
            owner_limit: Maximum bytes stored for the owner; None for no limit.

        Returns:
            The capture's id.

        Raises:
            StoreFullError: A limit is reached, or the disk refuses the file.
        """
        capture_id = secrets.token_urlsafe(32)
        try:
            self._write(self._file(capture_id, file_format, owner), data, owner, owner_limit)
        except OSError as error:
            raise StoreFullError(f"the server cannot store {len(data)} bytes: {error.strerror or error}") from error
        return capture_id

    async def put_async(
        self, data: bytes, file_format: CaptureFormat, owner: bytes = NO_OWNER, owner_limit: int | None = None
    ) -> str:
        """Store ``data`` as :meth:`put` does, without blocking the event loop. Deleted if the caller is cancelled."""
        writing = asyncio.ensure_future(asyncio.to_thread(self.put, data, file_format, owner, owner_limit))
        try:
            capture_id = await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(partial(self._delete_written, owner))
            raise
        loop = asyncio.get_running_loop()
        delay = self.limits.expiry_seconds + 0.01
        # An empty context: a timer would otherwise keep the request's context, and so its rows, alive.
        loop.call_later(delay, loop.run_in_executor, None, self.remove_expired, context=Context())
        return capture_id

    def open(self, capture_id: str, owner: bytes = NO_OWNER) -> StoredCapture | None:
        """Open the capture; None if ``owner`` has no capture of this id, or it has expired."""
        for file_format in FORMATS:
            try:
                file = self._file(capture_id, file_format, owner).open("rb")
            except FileNotFoundError:
                continue
            status = os.fstat(file.fileno())
            if status.st_mtime > time.time():
                return StoredCapture(file, status.st_size, file_format)
            file.close()
        return None

    def delete(self, capture_id: str, owner: bytes = NO_OWNER) -> bool:
        """Delete the capture. Return whether ``owner`` had a capture of this id."""
        for file_format in FORMATS:
            try:
                self._file(capture_id, file_format, owner).unlink()
            except FileNotFoundError:
                continue
            self.update_metrics()
            return True
        return False

    def remove_expired(self) -> None:
        """Remove expired files of all processes, and incomplete files of killed processes."""
        now = time.time()
        for path, status in self._files():
            grace = self.limits.expiry_seconds if path.suffix == _PART else 0
            if status.st_mtime + grace <= now:
                path.unlink(missing_ok=True)
        self.update_metrics()

    def update_metrics(self) -> None:
        """Set the gauges to the current content."""
        set_gauge("store_bytes", self._used_bytes())
        set_gauge("store_limit_bytes", self.limits.budget_bytes)

    def close(self) -> None:
        """Leave the shared folder. The last process removes it."""
        if self._folder is not None:
            self._folder.leave()
            self._folder = None

    def _write(self, path: Path, data: bytes, owner: bytes, owner_limit: int | None) -> None:
        folder = self._folder
        if folder is None or not folder.exists():
            self._folder = folder = SharedTempDir(self._name)
        part = path.with_suffix(_PART)
        with folder.locked():
            self.remove_expired()
            self.check_room(len(data))
            if owner_limit is not None and self.usage(owner)[0] + len(data) > owner_limit:
                raise StoreFullError(
                    f"no room for {len(data)} bytes: this key may store {owner_limit} (--capture-key-store-mib)"
                )
            descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, len(data))  # reserves the size in the budget
            except BaseException:
                os.close(descriptor)
                part.unlink(missing_ok=True)
                raise
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            expires = time.time() + self.limits.expiry_seconds
            os.utime(part, (expires, expires))
            with folder.locked():
                # Locked, because a concurrent scan could miss the file under both of its names.
                part.rename(path)
            self.update_metrics()
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        try:
            paths = [path for path in self._path.iterdir() if path.name not in LOCK_FILES]
        except FileNotFoundError:
            return
        for path in paths:
            try:
                yield path, path.lstat()
            except FileNotFoundError:
                continue  # deleted or renamed concurrently

    def _used_bytes(self) -> int:
        return sum(status.st_size for _, status in self._files())

    def _file(self, capture_id: str, file_format: CaptureFormat, owner: bytes) -> Path:
        # The name has a fixed length for every id, including ids with surrogates.
        name = hashlib.sha256(owner + capture_id.encode("utf-8", "surrogatepass")).hexdigest()
        return self._path / f"{_owner_prefix(owner)}{name}.{file_format}"

    def _delete_written(self, owner: bytes, writing: asyncio.Future[str]) -> None:
        if not writing.cancelled() and writing.exception() is None:
            self.delete(writing.result(), owner)


def _owner_prefix(owner: bytes) -> str:
    """Return the prefix of all file names of ``owner``."""
    return f"{hashlib.sha256(owner).hexdigest()[:32]}-"
