# SPDX-License-Identifier: Apache-2.0
"""Storage of a registry in a directory that several server processes share.

``index.json`` is the state without content. ``objects/`` contains the content: one safetensors file per module, named
by its digest, so no path contains text from a client. A lock file admits one writer at a time; the kernel releases
the lock if its holder dies. A writer stores all content before it replaces the index by an atomic rename. Readers
therefore see the old state or the new state, and acknowledged changes survive a crash. Symbolic links are never
followed.

A reserved file holds enough space of the disk for the next index, so that a full disk does not prevent a change that
only removes something: global steering can always be cleared.

A reader keeps the index that it has read open. As long as it does, no other file can have the same inode, so a single
``stat`` reliably detects a newer index.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.fs.dirfd import (
    TEMPORARY_PREFIX,
    exists,
    open_dir,
    open_readonly,
    read_regular,
    reserve_space,
    write_atomic,
    write_reserved,
)
from vllm_steer.fs.mounts import WARNED, find_refusal, mount_of
from vllm_steer.registry.errors import FIELD, RegistryUnavailableError
from vllm_steer.registry.index import MAX_INDEX_BYTES, RegistryIndex, decode_index, encode_index
from vllm_steer.registry.module import DIGEST_PREFIX
from vllm_steer.registry.module_files import write_module
from vllm_steer.registry.snapshot import Snapshot
from vllm_steer.registry.storage import RegistryStore, reason_of

INDEX, LOCK, OBJECTS, SUFFIX, RESERVED = "index.json", "lock", "objects", ".safetensors", "reserved"
_FULL = (errno.ENOSPC, errno.EDQUOT)
LOCK_SECONDS = 10.0
"""How long a change waits for another process to finish its own."""
RETRY_SECONDS = 1.0
"""Interval between attempts to read content after an I/O error."""


class DirectoryStore(RegistryStore):
    """Registry storage in a directory."""

    def __init__(self, path: str | Path) -> None:
        """Open the directory, which is created if it does not exist.

        Raises:
            SteeringError: It is a symbolic link, belongs to another user, is writable by others, contains a damaged
                index, or is on a file system without locks that hold on all hosts.
        """
        super().__init__()
        self.path = Path(path)
        self._index_fd = -1
        self._retry_at: float | None = None
        with _report_errors(self.path):
            with suppress(FileExistsError):
                self.path.mkdir(mode=0o700, parents=True)
            self._root = open_dir(self.path)
            _check_private(self._root, self.path)
            _check_file_system(self.path)
            with suppress(FileExistsError):
                os.mkdir(OBJECTS, 0o700, dir_fd=self._root)
            self._objects = open_dir(OBJECTS, self._root)
            with self._exclusive():
                if not exists(INDEX, self._root):
                    write_atomic(INDEX, msgspec.json.encode(RegistryIndex()), self._root)
                self._reserve()
        self.refresh()

    def is_stale(self) -> bool:
        """Return whether there is a newer index, or whether it is time to retry content that could not be read."""
        if self._retry_at is not None and time.monotonic() >= self._retry_at:
            return True
        try:
            return not self._is_current(self._index_fd)
        except OSError:
            return True  # `refresh` reports the error

    def refresh(self) -> Snapshot:
        """Return the newest snapshot; raises ``RegistryUnavailableError``."""
        with self._lock, _report_errors(self.path, self._root):
            while self.is_stale():
                self._read()
            return self._snapshot

    def change(self, update: Callable[[Snapshot], Snapshot]) -> Snapshot:
        """Apply ``update`` to the newest snapshot, as `RegistryStore.change` specifies.

        Raises:
            RegistryFullError: The index would exceed its size limit.
            RegistryUnavailableError: The directory cannot be read or written.
        """
        with self._lock, _report_errors(self.path, self._root), self._exclusive():
            old = self.refresh()
            new = update(old)
            if new is not old:
                old_size = os.fstat(self._index_fd).st_size
                index = encode_index(new.index, old_size)
                for digest in new.contents.keys() - old.contents.keys():
                    write_atomic(_file_name(digest), write_module(new.contents[digest]), self._objects)
                self._write_index(index, removes=len(index) < old_size)
                self._adopt(open_readonly(INDEX, self._root), new)
                self._remove_unused(new.index)
                self._reserve()
            return self._snapshot

    def close(self) -> None:
        """Close the file descriptors."""
        for fd in (self._index_fd, self._objects, self._root):
            if fd >= 0:
                os.close(fd)

    def _write_index(self, index: bytes, *, removes: bool) -> None:
        try:
            write_atomic(INDEX, index, self._root)
        except OSError as error:
            if error.errno not in _FULL or not removes:
                raise
            write_reserved(RESERVED, INDEX, index, self._root)

    def _reserve(self) -> None:
        """Reserve space for an index that is smaller than the present one."""
        with suppress(OSError):  # a full disk: the next change tries again
            reserve_space(RESERVED, os.stat(INDEX, dir_fd=self._root).st_size, self._root)

    def _is_current(self, index_fd: int) -> bool:
        current = os.stat(INDEX, dir_fd=self._root, follow_symlinks=False)
        return os.path.samestat(current, os.fstat(index_fd))

    def _read(self) -> None:
        fd, adopted = open_readonly(INDEX, self._root), False
        try:
            index = decode_index(read_regular(fd, f"{FIELD}: {INDEX}", MAX_INDEX_BYTES))
            snapshot, failures = self._read_contents(index, self._read_object, "its file in the registry's directory")
            missing = any(isinstance(error, FileNotFoundError) for error in failures)
            # A symbolic link is a permanent error, and so is a missing file.
            retry = any(error.errno not in (errno.ELOOP, errno.ENOENT) for error in failures)
            if missing and not self._is_current(fd):
                return  # a concurrent writer published a newer index and removed the file
            self._adopt(fd, snapshot)
            adopted = True
            self._retry_at = time.monotonic() + RETRY_SECONDS if retry else None
        finally:
            if not adopted:
                os.close(fd)

    def _read_object(self, digest: str) -> bytes:
        fd = open_readonly(_file_name(digest), self._objects)
        try:
            return read_regular(fd, _file_name(digest))
        finally:
            os.close(fd)

    def _adopt(self, index_fd: int, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        old, self._index_fd = self._index_fd, index_fd
        if old >= 0:
            os.close(old)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Exclude the writers of all other processes."""
        fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._root)
        try:
            deadline = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise RegistryUnavailableError(FIELD, "another process is changing it; try again") from None
                    time.sleep(0.01)
            yield
        finally:
            os.close(fd)

    def _remove_unused(self, index: RegistryIndex) -> None:
        """Remove content that the index does not refer to, and temporary files of killed writers."""
        needed = {_file_name(digest) for digest in index.digests()}
        for folder, keep in ((self._objects, needed), (self._root, {INDEX, LOCK, OBJECTS, RESERVED})):
            for name in set(os.listdir(folder)) - keep:
                if name.startswith(TEMPORARY_PREFIX) or (folder == self._objects and name.endswith(SUFFIX)):
                    with suppress(OSError):  # an unused file only costs space
                        os.unlink(name, dir_fd=folder)


def _check_private(directory: int, path: Path) -> None:
    status = os.fstat(directory)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise SteeringError(FIELD, f"others can write to {path}; use a directory of your own with mode 0700")


def _check_file_system(path: Path) -> None:
    mount = mount_of(path)
    if mount is None:
        return
    refusal = find_refusal(mount)
    if refusal is not None:
        raise SteeringError(FIELD, f"{path} is on {mount.kind}: {refusal}. Use a local folder or a database URL")
    if mount.kind in WARNED:
        from vllm_steer.log import steering_logger  # loads vLLM, which the storage needs for nothing else

        steering_logger(__name__).warning(
            "The steering registry %s is on %s: %s. Use a database URL if servers of several hosts share it",
            path,
            mount.kind,
            WARNED[mount.kind],
        )


def _file_name(digest: str) -> str:
    name = digest.removeprefix(DIGEST_PREFIX)
    if len(name) != 64 or not name.isalnum():
        raise RegistryUnavailableError(FIELD, "its index contains an invalid digest")
    return name + SUFFIX


def _is_another(path: Path, root: int) -> bool:
    try:
        return not os.path.samestat(path.stat(), os.fstat(root))
    except OSError:
        return False


@contextmanager
def _report_errors(path: Path, root: int = -1) -> Iterator[None]:
    """Turn an ``OSError`` into a ``RegistryUnavailableError`` with its reason; ``root`` is the open directory."""
    try:
        yield
    except OSError as error:
        if root >= 0 and _is_another(path, root):
            raise RegistryUnavailableError(FIELD, "its folder was replaced; restart the server", str(path)) from error
        raise RegistryUnavailableError(FIELD, f"it cannot be read or written: {reason_of(error)}", str(path)) from error
