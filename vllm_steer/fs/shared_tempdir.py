# SPDX-License-Identifier: Apache-2.0
"""The folder in which the API servers of one ``vllm serve`` keep what is to be fetched.

All of them know its path, from a name in the parsed flags; only their own user can look into it. Each process that has
written to it holds a lock on it while it lives, so the last one to leave removes it, and a folder whose processes were
all killed is known by its free lock: the next server of that user removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

_PREFIX = f"vllm-steer-{os.getuid()}-"
_ALIVE, _LOCK = "alive", "lock"
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_AFTER_CHILDREN = -1
"""At exit, when multiprocessing has joined this process's children: their locks are free only when they are gone."""
BOOKKEEPING = frozenset({_ALIVE, _LOCK})
"""Files of the folder that are not kept for anybody."""


def spool_path(name: str) -> Path:
    """Where the folder of this name is, on every process of this machine and user."""
    return Path(tempfile.gettempdir()) / f"{_PREFIX}{name}"


class SharedTempDir:
    """A process's hold on the folder; making one makes the folder where it is not there. For any thread."""

    def __init__(self, name: str) -> None:
        _remove_abandoned()
        self.path = spool_path(name)
        self._alive = self._enter()
        # Where nobody leaves, at the end of the process.
        self._leave = Finalize(self, _leave, args=(self.path, self._alive), exitpriority=_AFTER_CHILDREN)

    def _enter(self) -> int:
        while True:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(0o700)
            status = self.path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise PermissionError(f"{self.path} is not a folder that only this user can look into")
            try:
                alive = os.open(self.path / _ALIVE, _FLAGS | os.O_CREAT, 0o600)
            except FileNotFoundError:
                continue  # removed by another process since
            fcntl.flock(alive, fcntl.LOCK_SH)
            if _is_there(alive, self.path / _ALIVE):
                return alive
            os.close(alive)

    def is_there(self) -> bool:
        """Whether the folder is still the one that was entered: systems tidy up temporary files that are some days
        old."""
        return _is_there(self._alive, self.path / _ALIVE)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other thread and process out: of what is in the folder, nothing changes meanwhile."""
        lock = os.open(self.path / _LOCK, _FLAGS | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def leave(self) -> None:
        """Let go, and remove the folder if nobody else holds it."""
        self._leave()  # only ever runs once


def _leave(path: Path, alive: int) -> None:
    try:
        # Where somebody has tidied up, what is there by now is not ours.
        if _is_there(alive, path / _ALIVE):
            with contextlib.suppress(FileNotFoundError):
                _remove_if_free(path, alive)
    finally:
        os.close(alive)


def _is_there(descriptor: int, path: Path) -> bool:
    """Whether ``path`` still is the file that was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _remove_if_free(path: Path, alive: int) -> None:
    try:
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    for entry in path.iterdir():
        if entry.name != _ALIVE:
            entry.unlink(missing_ok=True)
    (path / _ALIVE).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody has entered again
        path.rmdir()


def _remove_abandoned() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # its last process has just left
            if not path.is_symlink() and path.lstat().st_uid == os.getuid():
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    with contextlib.suppress(OSError):  # there is none, or another process is at it
        alive = os.open(path / _ALIVE, _FLAGS)
        try:
            if _is_there(alive, path / _ALIVE):
                _remove_if_free(path, alive)
        finally:
            os.close(alive)


def remove_at_exit(name: str) -> None:
    """Where this process ends, remove the folder unless another one holds it.

    For the process that starts the API servers: with ``--shutdown-timeout 0``, which is vLLM's default, it kills them
    before they can end by themselves. A fork of this process does not inherit it.
    """
    Finalize(None, _remove_if_abandoned, args=(spool_path(name),), exitpriority=_AFTER_CHILDREN)
