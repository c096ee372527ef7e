# SPDX-License-Identifier: Apache-2.0
"""Atomic creation of files in the root directory of a consumer.

A file is written as ``.NAME.part`` and renamed to ``NAME`` when it is complete. Creating the part file is exclusive; if
``NAME`` does not exist after that, the writer owns both names. So no file is ever overwritten, even if several
processes share the root. Symbolic links in the root are never followed. Writers lock their part files; a part file
without a lock was left by a dead writer and is removed when the next writer starts.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_steer.capture.files.format import SUFFIX
from vllm_steer.errors import SteeringError
from vllm_steer.fs.dirfd import exists, identity

logger = logging.getLogger("vllm_steer.capture")

_PART_SUFFIX = ".part"
_PART_NAME = re.compile(r"\.[a-z0-9-]+" + re.escape(SUFFIX + _PART_SUFFIX))
_MAX_BUFFERS = 1024  # IOV_MAX of Linux
_RECOUNT_SECONDS = 10.0


class CaptureWriteError(RuntimeError):
    """Rows could not be written. The text is safe to show to clients."""


class QuotaExceededError(CaptureWriteError):
    """A write would exceed the quota of the root."""


class CaptureDirectory:
    """Root directory of one consumer. Callers must hold the consumer's lock."""

    def __init__(self, root: str, *, fsync: bool = False, quota: int | None = None) -> None:
        """Create the directory if necessary, and check that it is writable.

        Args:
            root: Path of the directory.
            fsync: Whether a file is synced to disk before it appears.
            quota: Most bytes of all files in the directory, including those found there.

        Raises:
            SteeringError: The directory cannot be created or is not writable.
        """
        self.fsync = fsync
        self.quota = quota
        try:
            Path(root).mkdir(parents=True, exist_ok=True)
            self.path = Path(root).resolve(strict=True)
            self._remove_stale_parts()
            self._used, self._counted_at = self._count(), time.monotonic()
            self.create(f"trial-{secrets.token_hex(8)}").discard()
        except (OSError, CaptureWriteError) as error:
            cause = error.strerror if isinstance(error, OSError) else error
            raise SteeringError("root", f"cannot write captures to {root}: {cause}") from None

    def create(self, stem: str) -> PartFile:
        """Create a file that will appear as ``stem``, or as ``stem`` with a random ending if that name is taken.

        Raises:
            CaptureWriteError: The root is missing, read-only or full.
        """
        name = stem + SUFFIX
        with _translated_os_errors():
            directory_fd = self._open()
            try:
                while (fd := _create_part(directory_fd, name)) is None:
                    name = f"{stem}-{secrets.token_hex(8)}{SUFFIX}"
            except BaseException:
                os.close(directory_fd)
                raise
        return PartFile(self, directory_fd, fd, name)

    def add_used(self, size: int) -> None:
        """Add ``size`` bytes, possibly negative, to the used space.

        Raises:
            QuotaExceededError: The quota would be exceeded.
        """
        if self.quota is not None and size > 0 and self._used + size > self.quota:
            if time.monotonic() - self._counted_at > _RECOUNT_SECONDS:  # files may have been deleted
                self._used, self._counted_at = self._count(), time.monotonic()
            if self._used + size > self.quota:
                raise QuotaExceededError(
                    f"the quota of {self.quota} bytes is exhausted: {self._used} used, {size} more needed"
                )
        self._used += size

    def _open(self) -> int:
        return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def _count(self) -> int:
        with os.scandir(self.path) as entries:
            return sum(_file_size(entry) for entry in entries)

    def _remove_stale_parts(self) -> None:
        directory_fd = self._open()
        try:
            for name in filter(_PART_NAME.fullmatch, os.listdir(directory_fd)):
                with suppress(OSError):  # published, removed or locked in the meantime, or a link
                    fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory_fd)
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(name, dir_fd=directory_fd)
                        logger.warning("Removed the incomplete file %s of a dead writer", name)
                    finally:
                        os.close(fd)
        finally:
            os.close(directory_fd)


class PartFile:
    """An incomplete file, written at offsets and then published or discarded."""

    def __init__(self, root: CaptureDirectory, directory_fd: int, fd: int, name: str) -> None:
        self.path = root.path / name
        """Path under which the file will appear."""
        self._root = root
        self._directory_fd = directory_fd
        self._fd = fd
        self._reserved = 0

    def is_in_root(self) -> bool:
        """Return whether the root's path still refers to the directory of this file."""
        try:
            return identity(os.stat(self._root.path, follow_symlinks=False)) == identity(os.fstat(self._directory_fd))
        except OSError:
            return False

    def reserve(self, size: int) -> None:
        """Reserve disk space and quota for a file of ``size`` bytes.

        Raises:
            CaptureWriteError: The disk or the quota is full. The file is unchanged.
        """
        with _translated_os_errors():
            more = size - self._reserved
            if more > 0:
                self._root.add_used(more)
                try:
                    os.posix_fallocate(self._fd, self._reserved, more)
                except BaseException:
                    self._root.add_used(-more)
                    raise
                self._reserved = size

    def write(self, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        """Write ``buffers`` consecutively from ``offset`` on.

        Raises:
            CaptureWriteError: The write fails.
        """
        with _translated_os_errors():
            pending = [view for buffer in buffers if (view := memoryview(buffer)).nbytes]
            pending.reverse()
            while pending:
                batch = pending[-_MAX_BUFFERS:]
                batch.reverse()
                written = os.pwritev(self._fd, batch, offset)
                offset += written
                while pending and written >= pending[-1].nbytes:
                    written -= pending.pop().nbytes
                if written:
                    pending[-1] = pending[-1].cast("B")[written:]

    def publish(self, size: int) -> None:
        """Truncate the file to ``size`` bytes and rename it to its final name.

        Raises:
            CaptureWriteError: The file cannot be published. It is removed.
        """
        part, name = _part_name(self.path.name), self.path.name
        try:
            with _translated_os_errors():
                os.ftruncate(self._fd, size)
                if self._root.fsync:
                    os.fsync(self._fd)
                if not self._owns_part():
                    raise FileNotFoundError(errno.ENOENT, "another file has taken its name")
                os.rename(part, name, src_dir_fd=self._directory_fd, dst_dir_fd=self._directory_fd)
                if self._root.fsync:
                    os.fsync(self._directory_fd)
        except BaseException:
            self.discard()
            raise
        self._root.add_used(size - self._reserved)
        self._close()

    def discard(self) -> None:
        """Remove the file."""
        with suppress(OSError):  # already gone, or the file system has become read-only
            if self._owns_part():
                os.unlink(_part_name(self.path.name), dir_fd=self._directory_fd)
        self._root.add_used(-self._reserved)
        self._close()

    def _owns_part(self) -> bool:
        part = os.stat(_part_name(self.path.name), dir_fd=self._directory_fd, follow_symlinks=False)
        return identity(part) == identity(os.fstat(self._fd))

    def _close(self) -> None:
        os.close(self._fd)
        os.close(self._directory_fd)


@contextmanager
def _translated_os_errors() -> Iterator[None]:
    """Convert an OSError to a CaptureWriteError that contains the cause but no path of the server."""
    try:
        yield
    except OSError as error:
        cause = error.strerror or str(error)
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE):
            raise CaptureWriteError(f"the capture directory has vanished ({cause})") from error
        raise CaptureWriteError(f"cannot write to the capture directory: {cause}") from error


def _create_part(directory_fd: int, name: str) -> int | None:
    """Create and lock the part file of ``name``; return its descriptor, or None if the name is taken."""
    part = _part_name(name)
    try:
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=directory_fd)
    except FileExistsError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # another process takes the still unlocked file for stale
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        os.unlink(part, dir_fd=directory_fd)
        raise
    if os.fstat(fd).st_nlink == 0:  # another process has removed it as stale
        os.close(fd)
        return None
    if exists(name, directory_fd):
        os.unlink(part, dir_fd=directory_fd)
        os.close(fd)
        return None
    return fd


def _part_name(name: str) -> str:
    return f".{name}{_PART_SUFFIX}"


def _file_size(entry: os.DirEntry[str]) -> int:
    with suppress(FileNotFoundError):
        if entry.is_file(follow_symlinks=False):
            return entry.stat(follow_symlinks=False).st_size
    return 0
