# SPDX-License-Identifier: Apache-2.0
"""Creation of files in the root directory of a consumer.

Creating a file is exclusive, so no file is ever overwritten, even if several processes share the root. Symbolic links
in the root are never followed. A file that must appear complete is written as ``.NAME.part`` and renamed to ``NAME``; a
file that is appended to has its name from the start. Writers lock their files. An incomplete file without a lock was
left by a killed process: the next writer removes a part file and repairs a stream.
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
from typing import Any

from vllm_steer.capture.files.format import CaptureFileError
from vllm_steer.capture.files.stream import END_OF_STREAM
from vllm_steer.capture.files.stream_file import scan
from vllm_steer.errors import SteeringError
from vllm_steer.fs.dirfd import exists, identity

logger = logging.getLogger("vllm_steer.capture")

_PART_SUFFIX = ".part"
_PART_NAME = re.compile(r"\.[a-z0-9-]+\.safetensors\.part")
_STREAM_NAME = re.compile(r"(packed|sharded)-\d{8}t\d{6}-\d{9}-[0-9a-f]{8}(-[0-9a-f]{16})?\.arrows")
_MAX_BUFFERS = 1024  # IOV_MAX of Linux
_RECOUNT_SECONDS = 10.0


class CaptureWriteError(RuntimeError):
    """Rows could not be written. The text is safe to show to clients."""


class QuotaExceededError(CaptureWriteError):
    """A write would exceed the quota of the root."""


class CaptureDirectory:
    """Root directory of one consumer. Callers must hold the consumer's lock."""

    def __init__(self, root: str, *, fsync: bool = False, quota: int | None = None) -> None:
        """Create the directory if necessary, check that it is writable, and repair what killed writers left.

        Args:
            root: Path of the directory. A leading ``~`` is the home directory, as in shells, which do not expand it in
                ``filesystem:root=~/acts``.
            fsync: Whether writes are synced to disk before they are reported.
            quota: Most bytes of all files in the directory, including those found there.

        Raises:
            SteeringError: The directory cannot be created or is not writable.
        """
        self.fsync = fsync
        self.quota = quota
        if not root:
            raise SteeringError("root", "is empty; name a directory, such as acts, or . for the present one")
        try:
            path = Path(root).expanduser()
            path.mkdir(parents=True, exist_ok=True)
            self.path = path.resolve(strict=True)
            self._repair()
            self._used, self._counted_at = self._count(), time.monotonic()
            self.create(f"trial-{secrets.token_hex(8)}", ".safetensors", hidden=True).discard()
        except (OSError, RuntimeError) as error:  # RuntimeError: a CaptureWriteError, or ~ of an unknown user
            cause = error.strerror if isinstance(error, OSError) else error
            raise SteeringError("root", f"cannot write captures to {root}: {cause}") from None

    def create(self, stem: str, suffix: str, *, hidden: bool) -> OutputFile:
        """Create an empty file. If its name is taken, a random ending is added to the stem.

        Args:
            stem: Name without suffix.
            suffix: Suffix of the name.
            hidden: Whether the file appears under its name only when it is published.

        Raises:
            CaptureWriteError: The root is missing, read-only or full.
        """
        name = stem + suffix
        with _translated_os_errors():
            directory_fd = self._open()
            try:
                while (fd := _create(directory_fd, name, hidden)) is None:
                    name = f"{stem}-{secrets.token_hex(8)}{suffix}"
                if self.fsync and not hidden:
                    os.fsync(directory_fd)
            except BaseException:
                os.close(directory_fd)
                raise
        return OutputFile(self, directory_fd, fd, name, hidden)

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

    def _repair(self) -> None:
        directory_fd = self._open()
        try:
            for name in os.listdir(directory_fd):
                if not (_PART_NAME.fullmatch(name) or _STREAM_NAME.fullmatch(name)):
                    continue
                with suppress(OSError):  # published, removed or locked in the meantime, or a link
                    fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory_fd)
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        if name.endswith(_PART_SUFFIX):
                            os.unlink(name, dir_fd=directory_fd)
                            logger.warning("Removed the incomplete file %s of a killed writer", name)
                        else:
                            self._repair_stream(fd, name, directory_fd)
                    finally:
                        os.close(fd)
        finally:
            os.close(directory_fd)

    def _repair_stream(self, fd: int, name: str, directory_fd: int) -> None:
        """Cut a stream off after its last whole request and end it."""
        size = os.fstat(fd).st_size
        if os.pread(fd, len(END_OF_STREAM), max(0, size - len(END_OF_STREAM))) == END_OF_STREAM:
            return
        try:
            found = scan(f"/proc/self/fd/{fd}")
        except CaptureFileError as error:
            logger.error("%s was not repaired: %s", name, str(error).replace(f"/proc/self/fd/{fd}", "the file"))
            return
        if not found.places:
            os.unlink(name, dir_fd=directory_fd)
            logger.warning("Removed %s of a killed writer, which has no complete request", name)
            return
        os.ftruncate(fd, found.end)
        os.pwrite(fd, END_OF_STREAM, found.end)
        logger.warning("Repaired %s of a killed writer: %d requests are complete", name, len(found.places))


class OutputFile:
    """A file that is being written. A failed write leaves it unchanged."""

    def __init__(self, root: CaptureDirectory, directory_fd: int, fd: int, name: str, hidden: bool) -> None:
        self.path = root.path / name
        """Path under which the file appears."""
        self.size = 0
        """Bytes written."""
        self._root = root
        self._directory_fd = directory_fd
        self._fd = fd
        self._entry = _part_name(name) if hidden else name

    def is_in_place(self) -> bool:
        """Return whether the file's path refers to this file: neither it nor the root was moved or removed."""
        try:
            return identity(os.stat(self.path, follow_symlinks=False)) == identity(os.fstat(self._fd))
        except OSError:
            return False

    def append(self, buffers: Sequence[Any]) -> None:
        """Append objects that support the buffer protocol.

        Raises:
            CaptureWriteError: The write fails, or the quota is full.
        """
        pending = [view for buffer in buffers if (view := memoryview(buffer)).nbytes]
        more = sum(view.nbytes for view in pending)
        self._root.add_used(more)
        try:
            with _translated_os_errors():
                self._write(pending)
        except BaseException:
            self._root.add_used(-more)
            with suppress(OSError):
                os.ftruncate(self._fd, self.size)
            raise
        self.size += more

    def _write(self, pending: list[memoryview]) -> None:
        offset = self.size
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

    def sync(self) -> None:
        """Sync the file to disk if the directory's option ``fsync`` is set.

        Raises:
            CaptureWriteError: The disk fails.
        """
        if self._root.fsync:
            with _translated_os_errors():
                os.fsync(self._fd)

    def publish(self) -> None:
        """Rename a hidden file to its name.

        Raises:
            CaptureWriteError: The file cannot be published. It is removed.
        """
        try:
            self.sync()
            with _translated_os_errors():
                if not self._owns_entry():
                    raise FileNotFoundError(errno.ENOENT, "another file has taken its name")
                name, fd = self.path.name, self._directory_fd
                os.rename(self._entry, name, src_dir_fd=fd, dst_dir_fd=fd)
                if self._root.fsync:
                    os.fsync(fd)
        except BaseException:
            self.discard()
            raise
        self.close()

    def discard(self) -> None:
        """Remove the file."""
        with suppress(OSError):  # already gone, or the file system has become read-only
            if self._owns_entry():
                os.unlink(self._entry, dir_fd=self._directory_fd)
        self._root.add_used(-self.size)
        self.close()

    def close(self) -> None:
        """Release the file and its lock."""
        os.close(self._fd)
        os.close(self._directory_fd)

    def _owns_entry(self) -> bool:
        entry = os.stat(self._entry, dir_fd=self._directory_fd, follow_symlinks=False)
        return identity(entry) == identity(os.fstat(self._fd))


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


def _create(directory_fd: int, name: str, hidden: bool) -> int | None:
    """Create and lock ``name``, or its part file if hidden; return its descriptor, or None if the name is taken."""
    entry = _part_name(name) if hidden else name
    try:
        fd = os.open(entry, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=directory_fd)
    except FileExistsError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # another process takes the still unlocked file for an abandoned one
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        os.unlink(entry, dir_fd=directory_fd)
        raise
    if os.fstat(fd).st_nlink == 0:  # another process has removed it as stale
        os.close(fd)
        return None
    if hidden and exists(name, directory_fd):
        os.unlink(entry, dir_fd=directory_fd)
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
