# SPDX-License-Identifier: Apache-2.0
"""A registry in a folder that several server processes share, and that outlives them.

``index.json`` is the whole state but for content; ``objects/`` has the content, each module as a safetensors file
named by its digest, so nothing that a client wrote is ever part of a path. One process writes at a time, under a lock
that the kernel gives back when its holder dies. A state becomes the current one by one rename, after all that it needs
is on the disk, so whoever reads sees the old state or the new one, and what was acknowledged survives a crash. Links
are never followed.

A reader keeps the index open that it has read: its inode cannot be another file's as long as it does, so one ``stat``
says for certain whether there is a newer one.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.fs.dirfd import exists, hold, identity
from vllm_steer.registry.errors import RegistryFullError, RegistryUnavailableError
from vllm_steer.registry.module import DIGEST_PREFIX, Module
from vllm_steer.registry.module_files import read_module, write_module
from vllm_steer.registry.snapshot import INDEX_VERSION, Index, Snapshot

FIELD = "steering registry"
INDEX, LOCK, OBJECTS, SUFFIX = "index.json", "lock", "objects", ".safetensors"
LOCK_SECONDS = 10.0
"""How long a change waits for another process's."""
AGAIN_SECONDS = 1.0
"""After how long content is tried again that could not be read for now."""
MAX_INDEX = 1 << 28
"""Most bytes of an index that is read."""
INDEX_ROOM = MAX_INDEX // 2
"""Most bytes to which a change makes one grow, so that what is written can be read."""
_TEMPORARY = ".tmp-"


class DirectoryStore:
    """The state in a folder, as one process sees it."""

    def __init__(self, path: str | Path) -> None:
        """Open the folder, which is made if it is not there.

        Raises:
            SteeringError: it is a link, belongs to somebody else or can be written to by others, or what is in it
                cannot be read.
        """
        self.path = Path(path)
        self._lock = threading.RLock()
        self._seen = -1
        self._again: float | None = None
        with _telling_why(self.path):
            with suppress(FileExistsError):
                self.path.mkdir(mode=0o700, parents=True)
            self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            _check_private(self._folder, self.path)
            with suppress(FileExistsError):
                os.mkdir(OBJECTS, 0o700, dir_fd=self._folder)
            self._objects = os.open(OBJECTS, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._folder)
            self._snapshot = Snapshot()
            with self._writing():
                if not exists(INDEX, self._folder):
                    self._publish(self._folder, INDEX, msgspec.json.encode(Index()))
        self.refresh()

    @property
    def snapshot(self) -> Snapshot:
        """The state as this process last saw it."""
        return self._snapshot

    def is_stale(self) -> bool:
        """Whether the index is another file than the one that was read; one ``stat``. Or whether content is to be tried
        again: where descriptors have run out, say, a failure tells nothing of the file."""
        if self._again is not None and time.monotonic() >= self._again:
            return True
        try:
            return identity(os.stat(INDEX, dir_fd=self._folder, follow_symlinks=False)) != self._seen_identity
        except OSError:
            return True  # and `refresh` says why

    def refresh(self) -> Snapshot:
        """Read what is new; raises RegistryUnavailableError."""
        with self._lock, _telling_why(self.path):
            while self.is_stale():
                self._read()
            return self._snapshot

    def change(self, make: Callable[[Snapshot], Snapshot]) -> Snapshot:
        """As `Store.change` says; raises RegistryFullError where the index would have no room for it."""
        with self._lock, _telling_why(self.path), self._writing():
            old = self.refresh()
            new = make(old)
            if new is not old:
                index = self._encode(new.index)
                for digest in new.contents.keys() - old.contents.keys():
                    self._publish(self._objects, _file_name(digest), write_module(new.contents[digest]))
                self._publish(self._folder, INDEX, index)
                self._remember(new)
                self._prune(new.index)
            return self._snapshot

    def close(self) -> None:
        """Close what is open; nothing is lost."""
        for fd in (self._seen, self._objects, self._folder):
            if fd >= 0:
                os.close(fd)

    @property
    def _seen_identity(self) -> tuple[int, int] | None:
        return None if self._seen < 0 else identity(os.fstat(self._seen))

    def _encode(self, index: Index) -> bytes:
        """The file of an index that is to follow the one last read; one that is no longer than that always may."""
        data = msgspec.json.encode(index)
        if len(data) > max(INDEX_ROOM, os.fstat(self._seen).st_size):
            raise RegistryFullError(
                "module",
                f"would make the registry's index, which has the texts about all modules, {len(data)} bytes; "
                f"{INDEX_ROOM} is the most there can be; delete one, or say less in description and provenance",
            )
        return data

    def _read(self) -> None:
        fd = _open(INDEX, self._folder)
        try:
            index = _decode(_contents(fd, MAX_INDEX))
            contents = dict(self._snapshot.contents)
            problems: dict[str, str] = {}
            again = False
            needed = index.digests()
            for digest in needed - contents.keys():
                try:
                    contents[digest] = self._read_object(digest)
                except FileNotFoundError:
                    if identity(os.fstat(fd)) != identity(os.stat(INDEX, dir_fd=self._folder, follow_symlinks=False)):
                        os.close(fd)  # removed by whoever published a newer state
                        return
                    problems[digest] = "its file is missing from the registry's folder"
                except SteeringError as error:
                    problems[digest] = f"its file in the registry's folder is damaged: {error}"
                except OSError as error:
                    problems[digest] = f"its file in the registry's folder cannot be read: {error.strerror or error}"
                    again = again or error.errno != errno.ELOOP  # which a link stays
        except BaseException:
            with suppress(OSError):
                os.close(fd)
            raise
        self._adopt(fd, Snapshot(index, {digest: contents[digest] for digest in needed & contents.keys()}, problems))
        self._again = time.monotonic() + AGAIN_SECONDS if again else None

    def _read_object(self, digest: str) -> Module:
        fd = _open(_file_name(digest), self._objects)
        try:
            module, _ = read_module(_contents(fd, 1 << 40))
        finally:
            os.close(fd)
        if module.digest != digest:
            raise SteeringError(digest, f"the file holds {module.digest}")
        return module

    def _remember(self, snapshot: Snapshot) -> None:
        # Under the writer's lock: the index that is there is the one just written.
        self._adopt(_open(INDEX, self._folder), snapshot)

    def _adopt(self, fd: int, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        old, self._seen = self._seen, fd
        if old >= 0:
            os.close(old)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Be the one process that writes."""
        fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._folder)
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

    def _publish(self, folder: int, name: str, data: bytes) -> None:
        """Let a file appear whole, on the disk, in place of what had its name."""
        temporary = f"{_TEMPORARY}{secrets.token_hex(8)}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        try:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        os.fsync(folder)

    def _prune(self, index: Index) -> None:
        """Remove content that no state needs any more, and what a writer that died has left behind."""
        needed = {_file_name(digest) for digest in index.digests()}
        for folder, keep in ((self._objects, needed), (self._folder, {INDEX, LOCK, OBJECTS})):
            for name in set(os.listdir(folder)) - keep:
                if name.startswith(_TEMPORARY) or (folder == self._objects and name.endswith(SUFFIX)):
                    with suppress(OSError):  # it costs room, and nothing else
                        os.unlink(name, dir_fd=folder)


def private_folder() -> str:
    """A new folder for a registry that is to end with this process."""
    folder = tempfile.mkdtemp(prefix="vllm-steer-registry-")  # mode 700
    held = hold(folder)  # were it cleared while nobody registers anything, all requests would be refused
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # children inherit what is to be done at the end
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)

    atexit.register(remove)
    return folder


def _decode(data: bytes) -> Index:
    try:
        index = msgspec.json.decode(data, type=Index)
    except msgspec.MsgspecError as error:
        raise RegistryUnavailableError(FIELD, f"its index cannot be read: {error}") from None
    if index.version != INDEX_VERSION:
        raise RegistryUnavailableError(FIELD, f"its index is of version {index.version}, not {INDEX_VERSION}")
    return index


def _check_private(folder: int, path: Path) -> None:
    about = os.fstat(folder)
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise SteeringError(FIELD, f"others can write to {path}; use a folder of one's own, with mode 700")


def _file_name(digest: str) -> str:
    name = digest.removeprefix(DIGEST_PREFIX)
    if len(name) != 64 or not name.isalnum():
        raise RegistryUnavailableError(FIELD, "its index names content by something that is no digest")
    return name + SUFFIX


def _open(name: str, folder: int) -> int:
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)


def _contents(fd: int, limit: int) -> bytes:
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_size > limit:
        raise SteeringError(FIELD, "something in its folder is no file that it has written")
    with os.fdopen(os.dup(fd), "rb") as file:
        return file.read()


@contextmanager
def _telling_why(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RegistryUnavailableError(FIELD, f"{path}: {error.strerror or error}") from error
