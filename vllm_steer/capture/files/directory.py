# SPDX-License-Identifier: Apache-2.0
"""The root folder of captures: files appear there whole, under names that were free, or not at all.

A file is written as ``.NAME.part`` and renamed to ``NAME`` when it is complete. Whoever has created the part, which
only one can, and then finds no ``NAME``, owns both names, so no file is ever overwritten, also where several processes
share the root. Links in the root are never followed. A part whose writer is gone holds no lock and is removed when the
next writer starts.
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

PART = ".part"
_PART_NAME = re.compile(r"\.[a-z0-9-]+" + re.escape(SUFFIX + PART))
_MOST_BUFFERS = 1024  # IOV_MAX of Linux
_RECOUNT_SECONDS = 10.0


class CaptureWriteError(RuntimeError):
    """Rows could not be written; the text is the cause, as the client may read it."""


class QuotaError(CaptureWriteError):
    """What is to be written would take the root over its quota."""


class CaptureDirectory:
    """The root folder of one consumer. Used under the lock of whoever holds it."""

    def __init__(self, root: str, *, fsync: bool = False, quota: int | None = None) -> None:
        """Make the folder if it is not there, and try that it can be written to.

        Args:
            root: its path.
            fsync: whether a file is on the disk, not only with the kernel, when it appears.
            quota: most bytes of all files in it, those found there included.

        Raises:
            SteeringError: it cannot be made, or not be written to.
        """
        self.fsync = fsync
        self.quota = quota
        try:
            Path(root).mkdir(parents=True, exist_ok=True)
            self.path = Path(root).resolve(strict=True)
            self._remove_stale()
            self._used, self._counted = self._count(), time.monotonic()
            self.create(f"trial-{secrets.token_hex(8)}").discard()
        except (OSError, CaptureWriteError) as error:
            cause = error.strerror if isinstance(error, OSError) else error
            raise SteeringError("root", f"captures cannot be written to {root}: {cause}") from None

    def create(self, stem: str) -> PartFile:
        """A new file to be written, to appear as ``stem`` or, if that is taken, ``stem`` with a random ending.

        Raises:
            CaptureWriteError: the root is gone, read-only or full.
        """
        name = stem + SUFFIX
        with telling_why():
            folder = self._open()
            try:
                while (fd := _create(folder, name)) is None:
                    name = f"{stem}-{secrets.token_hex(8)}{SUFFIX}"
            except BaseException:
                os.close(folder)
                raise
        return PartFile(self, folder, fd, name)

    def charge(self, size: int) -> None:
        """Count ``size`` more bytes (fewer, where negative) as used; raises QuotaError where they are too many."""
        if self.quota is not None and size > 0 and self._used + size > self.quota:
            if time.monotonic() - self._counted > _RECOUNT_SECONDS:  # somebody may have made room
                self._used, self._counted = self._count(), time.monotonic()
            if self._used + size > self.quota:
                raise QuotaError(f"the quota of {self.quota} bytes is reached: {self._used} used, {size} more needed")
        self._used += size

    def _open(self) -> int:
        return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def _count(self) -> int:
        with os.scandir(self.path) as entries:
            return sum(_size(entry) for entry in entries)

    def _remove_stale(self) -> None:
        folder = self._open()
        try:
            for name in filter(_PART_NAME.fullmatch, os.listdir(folder)):
                with suppress(OSError):  # published, removed or locked by its writer meanwhile, or a link
                    fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(name, dir_fd=folder)
                        logger.warning("removed %s, which its writer left incomplete", name)
                    finally:
                        os.close(fd)
        finally:
            os.close(folder)


class PartFile:
    """A file on its way: written at offsets, then published or discarded."""

    def __init__(self, root: CaptureDirectory, folder: int, fd: int, name: str) -> None:
        self.path = root.path / name
        """Where it will appear."""
        self._root = root
        self._folder = folder
        self._fd = fd
        self._reserved = 0

    def is_in_root(self) -> bool:
        """Whether the root's path still leads to the folder in which it was made."""
        try:
            return identity(os.stat(self._root.path, follow_symlinks=False)) == identity(os.fstat(self._folder))
        except OSError:
            return False

    def reserve(self, size: int) -> None:
        """Make sure that the file can grow to ``size`` bytes.

        Raises:
            CaptureWriteError: the disk or the quota is full; the file is as it was.
        """
        with telling_why():
            more = size - self._reserved
            if more > 0:
                self._root.charge(more)
                try:
                    os.posix_fallocate(self._fd, self._reserved, more)
                except BaseException:
                    self._root.charge(-more)
                    raise
                self._reserved = size

    def write(self, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        """Write ``buffers`` one after the other from ``offset`` on; raises CaptureWriteError."""
        with telling_why():
            waiting = [view for buffer in buffers if (view := memoryview(buffer)).nbytes]
            waiting.reverse()
            while waiting:
                batch = waiting[-_MOST_BUFFERS:]
                batch.reverse()
                written = os.pwritev(self._fd, batch, offset)
                offset += written
                while waiting and written >= waiting[-1].nbytes:
                    written -= waiting.pop().nbytes
                if written:
                    waiting[-1] = waiting[-1].cast("B")[written:]

    def publish(self, size: int) -> None:
        """Cut the file to ``size`` bytes and let it appear; a failure discards it and raises CaptureWriteError."""
        name = self.path.name
        try:
            with telling_why():
                os.ftruncate(self._fd, size)
                if self._root.fsync:
                    os.fsync(self._fd)
                if identity(os.stat(_part(name), dir_fd=self._folder, follow_symlinks=False)) != self._id():
                    raise FileNotFoundError(errno.ENOENT, "another file has taken its name")
                os.rename(_part(name), name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
                if self._root.fsync:
                    os.fsync(self._folder)
        except BaseException:
            self.discard()
            raise
        self._root.charge(size - self._reserved)
        self._close()

    def discard(self) -> None:
        """Remove what was written."""
        with suppress(OSError):  # gone already, or on a disk that has become read-only: nothing more can be done
            if identity(os.stat(_part(self.path.name), dir_fd=self._folder, follow_symlinks=False)) == self._id():
                os.unlink(_part(self.path.name), dir_fd=self._folder)
        self._root.charge(-self._reserved)
        self._close()

    def _id(self) -> tuple[int, int]:
        return identity(os.fstat(self._fd))

    def _close(self) -> None:
        os.close(self._fd)
        os.close(self._folder)


@contextmanager
def telling_why() -> Iterator[None]:
    """Turn an OSError into a CaptureWriteError that says the cause and no path of the server."""
    try:
        yield
    except OSError as error:
        cause = error.strerror or str(error)
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE):
            raise CaptureWriteError(f"the capture root has vanished ({cause})") from error
        raise CaptureWriteError(f"the capture root cannot be written to: {cause}") from error


def _create(folder: int, name: str) -> int | None:
    """The open part of ``name``, exclusively ours; None where the name is taken."""
    try:
        fd = os.open(_part(name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=folder)
    except FileExistsError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # taken for stale in the moment before it was locked
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        os.unlink(_part(name), dir_fd=folder)
        raise
    if os.fstat(fd).st_nlink == 0:  # and removed for it
        os.close(fd)
        return None
    if exists(name, folder):
        os.unlink(_part(name), dir_fd=folder)
        os.close(fd)
        return None
    return fd


def _part(name: str) -> str:
    return f".{name}{PART}"


def _size(entry: os.DirEntry[str]) -> int:
    with suppress(FileNotFoundError):
        if entry.is_file(follow_symlinks=False):
            return entry.stat(follow_symlinks=False).st_size
    return 0
