# SPDX-License-Identifier: Apache-2.0
"""The interface of registry storage, its in-process implementation, and the choice between the others."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from vllm_steer.errors import SteeringError
from vllm_steer.registry.index import RegistryIndex
from vllm_steer.registry.location import is_url
from vllm_steer.registry.module_files import read_module
from vllm_steer.registry.snapshot import Snapshot


class RegistryStore(ABC):
    """Storage of the current registry state. Implementations are thread-safe."""

    is_remote = False
    """Whether `is_stale` can wait for another machine, so that an event loop must not call it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held by implementations while they read or change the state."""
        self._snapshot = Snapshot()

    @property
    def snapshot(self) -> Snapshot:
        """Snapshot that this process read last."""
        return self._snapshot

    @abstractmethod
    def is_stale(self) -> bool:
        """Return whether another process has changed the state since; fast enough to call for every request."""

    @abstractmethod
    def refresh(self) -> Snapshot:
        """Return the newest snapshot; raises ``RegistryUnavailableError``."""

    @abstractmethod
    def change(self, update: Callable[[Snapshot], Snapshot]) -> Snapshot:
        """Apply ``update`` to the newest snapshot. When this returns, the result is stored and visible to others.

        ``update`` may raise an error or return its argument, in which case nothing changes. Raises
        ``RegistryUnavailableError``.
        """

    def read_contents(
        self, index: RegistryIndex, read: Callable[[str], bytes], what: str
    ) -> tuple[Snapshot, list[OSError]]:
        """Return the snapshot of an index. Content that is already in memory is not read again.

        Args:
            index: The index.
            read: Returns the safetensors file with that digest; raises OSError.
            what: Name of such a file, for errors.

        Returns:
            The snapshot, with the reason for each content that cannot be read, and the errors of ``read``.
        """
        needed = index.digests()
        contents = {digest: module for digest, module in self._snapshot.contents.items() if digest in needed}
        problems: dict[str, str] = {}
        failures: list[OSError] = []
        for digest in needed - contents.keys():
            try:
                module, _ = read_module(read(digest))
                if module.digest != digest:
                    raise SteeringError(digest, f"the file contains {module.digest}")
                contents[digest] = module
            except SteeringError as error:
                problems[digest] = f"{what} is damaged: {error}"
            except OSError as error:
                failures.append(error)
                is_missing = isinstance(error, FileNotFoundError)
                problems[digest] = f"{what} " + ("is missing" if is_missing else f"cannot be read: {reason_of(error)}")
        return Snapshot(index, contents, problems), failures


class MemoryStore(RegistryStore):
    """Storage in the memory of one process."""

    def is_stale(self) -> bool:
        """Return False: there is no other process."""
        return False

    def refresh(self) -> Snapshot:
        """Return the snapshot."""
        return self._snapshot

    def change(self, update: Callable[[Snapshot], Snapshot]) -> Snapshot:
        """Apply ``update`` to the snapshot, as `RegistryStore.change` specifies."""
        with self.lock:
            self._snapshot = update(self._snapshot)
            return self._snapshot


def reason_of(error: OSError) -> str:
    """Return the reason of an error without its path."""
    return error.strerror or str(error)


def open_store(location: str) -> RegistryStore:
    """Open the storage in a folder, or in the database of a URL; raises ``SteeringError``."""
    if is_url(location):
        from vllm_steer.registry.database import DatabaseStore  # SQLAlchemy is optional

        return DatabaseStore(location)
    from vllm_steer.registry.directory import DirectoryStore

    return DirectoryStore(location)


T = TypeVar("T")


class SharedCall(Generic[T]):
    """A function that runs in a thread of its own, once for all that ask before it begins.

    A function without an answer, such as a query of a database, takes one thread however many requests wait for it, and
    none of those that other work needs.
    """

    def __init__(self, function: Callable[[], T], thread: str) -> None:
        self._function = function
        self._pool = ThreadPoolExecutor(1, thread)
        self._lock = threading.Lock()
        self._next: Future[T] | None = None
        """The call that has not begun yet."""

    async def run(self) -> T:
        """Return the result of a call that begins after this one."""
        with self._lock:
            if self._next is None:
                self._next = self._pool.submit(self._call)
            waiting = self._next
        # A client that leaves does not cancel the call for the others.
        return await asyncio.shield(asyncio.wrap_future(waiting))

    def _call(self) -> T:
        with self._lock:
            self._next = None
        return self._function()
