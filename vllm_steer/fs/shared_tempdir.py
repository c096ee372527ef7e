# SPDX-License-Identifier: Apache-2.0
"""Temporary directories of one process, and of several of one user, such as the API servers of one ``vllm serve``.

Every process finds the directory by its name, and only its user can access it. Each process that uses the directory
holds a shared lock on a file in it. The last process to leave removes the directory. If all of them were killed, the
lock is free, and the next process of that user that creates a shared directory removes the abandoned one.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

from vllm_steer.fs.dirfd import open_dir

_PREFIX = f"vllm-steer-{os.getuid()}-"
_MEMBERS, _MUTEX = "alive", "lock"
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_AFTER_CHILDREN = -1
"""Exit priority: run after multiprocessing has joined this process's children, which hold locks until they end."""
LOCK_FILES = frozenset({_MEMBERS, _MUTEX})
"""Names of the lock files in the directory."""


def shared_tempdir_path(name: str) -> Path:
    """Return the path of the shared directory ``name``, which is the same in every process of this machine and user."""
    return Path(tempfile.gettempdir()) / f"{_PREFIX}{name}"


class SharedTempDir:
    """One process's membership in a shared directory, which is created if it does not exist. Thread-safe."""

    def __init__(self, name: str) -> None:
        _remove_abandoned()
        self.path = shared_tempdir_path(name)
        self._members = self._join()
        # Without a call of `leave`: at the end of the process.
        self._leave = Finalize(self, _leave, args=(self.path, self._members), exitpriority=_AFTER_CHILDREN)

    def _join(self) -> int:
        while True:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(0o700)
            status = self.path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise PermissionError(f"{self.path} is not a directory that only this user can access")
            try:
                members = os.open(self.path / _MEMBERS, _FLAGS | os.O_CREAT, 0o600)
            except FileNotFoundError:
                continue  # another process has just removed the directory
            fcntl.flock(members, fcntl.LOCK_SH)
            if _is_open_at(members, self.path / _MEMBERS):
                return members
            os.close(members)

    def exists(self) -> bool:
        """Return whether the directory is still the one that was joined: systems delete old temporary files."""
        return _is_open_at(self._members, self.path / _MEMBERS)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude every other thread and process that calls this method of the same directory."""
        lock = os.open(self.path / _MUTEX, _FLAGS | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def leave(self) -> None:
        """End the membership, and remove the directory if this was the last member. Later calls do nothing."""
        self._leave()


def remove_at_exit(name: str) -> None:
    """Remove the directory when this process exits, unless another process is a member.

    For the process that starts the API servers: with ``--shutdown-timeout 0``, vLLM's default, it kills them before
    they can clean up. Forks of this process do not inherit the exit handler.
    """
    Finalize(None, _remove_if_abandoned, args=(shared_tempdir_path(name),), exitpriority=_AFTER_CHILDREN)


def _leave(path: Path, members: int) -> None:
    try:
        # If the directory was deleted meanwhile, another one of that name is not ours to remove.
        if _is_open_at(members, path / _MEMBERS):
            with contextlib.suppress(FileNotFoundError):
                _remove_if_unlocked(path, members)
    finally:
        os.close(members)


def _is_open_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _remove_if_unlocked(path: Path, members: int) -> None:
    try:
        fcntl.flock(members, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    for entry in path.iterdir():
        if entry.name != _MEMBERS:
            entry.unlink(missing_ok=True)
    (path / _MEMBERS).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another process has joined
        path.rmdir()


def _remove_abandoned() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # its last process has just left
            if not path.is_symlink() and path.lstat().st_uid == os.getuid():
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    with contextlib.suppress(OSError):  # it does not exist, or another process is removing it
        members = os.open(path / _MEMBERS, _FLAGS)
        try:
            if _is_open_at(members, path / _MEMBERS):
                _remove_if_unlocked(path, members)
        finally:
            os.close(members)


def private_tempdir(prefix: str) -> str:
    """Return the path of a new temporary directory with mode 0700. It is removed when this process exits.

    The directory is locked for as long as the process lives, because systemd-tmpfiles removes temporary files that
    have not been used for some days but skips locked directories.
    """
    path = tempfile.mkdtemp(prefix=prefix)
    lock = open_dir(path)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_SH)
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # forked children inherit this exit handler
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)

    atexit.register(remove)
    return path
