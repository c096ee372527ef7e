# SPDX-License-Identifier: Apache-2.0
"""File operations relative to an open directory descriptor.

They keep working when the directory's path changes, and never follow a symbolic link in the last path component.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress

from vllm_steer.errors import SteeringError

TEMPORARY_PREFIX = ".tmp-"
"""Prefix of files that :func:`write_atomic` has not completed. A killed writer leaves them behind."""


def exists(name: str, dir_fd: int) -> bool:
    """Return whether the directory has an entry ``name``, without following links."""
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def identity(status: os.stat_result) -> tuple[int, int]:
    """Return device and inode, which identify a file for as long as it is open."""
    return status.st_dev, status.st_ino


def open_dir(path: str | os.PathLike[str], dir_fd: int | None = None) -> int:
    """Return a descriptor of the directory ``path``; a symbolic link raises ``OSError``."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)


def open_readonly(name: str, dir_fd: int) -> int:
    """Return a descriptor of the file ``name``. Opening a pipe does not block; a link raises ``OSError``."""
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)


def read_regular(fd: int, field: str, limit: int | None = None) -> bytes:
    """Return the content of an open file.

    Raises:
        SteeringError: For ``field``, if the file is not a regular file or is larger than ``limit`` bytes.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise SteeringError(field, "is not a regular file")
    if limit is not None and status.st_size > limit:
        raise SteeringError(field, f"has {status.st_size} bytes; at most {limit} are allowed")
    with os.fdopen(os.dup(fd), "rb") as file:
        return file.read()


def write_atomic(name: str, data: bytes, dir_fd: int, mode: int = 0o600) -> None:
    """Create or replace the file ``name``. When this returns, the file and its name are on the disk.

    The data are written to a temporary file, which is then renamed: readers see the old content or the new content.
    On failure, the temporary file is removed and ``name`` is unchanged.
    """
    temporary = f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    try:
        try:
            os.fchmod(fd, mode)  # regardless of the umask
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=dir_fd)
        raise
    os.fsync(dir_fd)


def reserve_space(name: str, size: int, dir_fd: int) -> None:
    """Create or extend the file ``name`` to at least ``size`` bytes of the disk, for `write_reserved`."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        if os.fstat(fd).st_size < size:
            os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def write_reserved(reserved: str, name: str, data: bytes, dir_fd: int) -> None:
    """Replace the file ``name`` as `write_atomic` does, in the space of ``reserved``, so that a full disk is enough."""
    fd = os.open(reserved, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.ftruncate(fd, len(data))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(reserved, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    os.fsync(dir_fd)
