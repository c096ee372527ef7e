# SPDX-License-Identifier: Apache-2.0
"""The interface of registry storage, its in-process implementation, and the choice between the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from vllm_steer.registry.location import is_url
from vllm_steer.registry.snapshot import Snapshot


class RegistryStore(Protocol):
    """Storage of the current registry state. Implementations are thread-safe."""

    @property
    def is_remote(self) -> bool:
        """Whether `is_stale` can wait for another machine, so that an event loop must not call it."""

    @property
    def snapshot(self) -> Snapshot:
        """Snapshot that this process read last."""

    def is_stale(self) -> bool:
        """Return whether another process has changed the state since; fast enough to call for every request."""

    def refresh(self) -> Snapshot:
        """Return the newest snapshot; raises ``RegistryUnavailableError``."""

    def change(self, update: Callable[[Snapshot], Snapshot]) -> Snapshot:
        """Apply ``update`` to the newest snapshot. When this returns, the result is stored and visible to others.

        ``update`` may raise an error or return its argument, in which case nothing changes. Raises
        ``RegistryUnavailableError``.
        """


class MemoryStore:
    """Storage in the memory of one process."""

    is_remote = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._snapshot = Snapshot()

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot

    def is_stale(self) -> bool:
        return False

    def refresh(self) -> Snapshot:
        return self._snapshot

    def change(self, update: Callable[[Snapshot], Snapshot]) -> Snapshot:
        with self._lock:
            self._snapshot = update(self._snapshot)
            return self._snapshot


def open_store(location: str) -> RegistryStore:
    """Open the storage in a folder, or in the database of a URL; raises ``SteeringError``."""
    if is_url(location):
        from vllm_steer.registry.database import DatabaseStore  # SQLAlchemy is optional

        return DatabaseStore(location)
    from vllm_steer.registry.directory import DirectoryStore

    return DirectoryStore(location)
