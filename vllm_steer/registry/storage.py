# SPDX-License-Identifier: Apache-2.0
"""Where the state of a registry is kept: in this process, or, for several processes, in a folder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from vllm_steer.registry.snapshot import Snapshot


class Store(Protocol):
    """The current state, and how it is changed."""

    @property
    def snapshot(self) -> Snapshot:
        """The state as this process last saw it."""

    def is_stale(self) -> bool:
        """Whether another process has changed the state since; cheap enough for every request."""

    def refresh(self) -> Snapshot:
        """See the newest state; raises RegistryUnavailableError."""

    def change(self, make: Callable[[Snapshot], Snapshot]) -> Snapshot:
        """Replace the newest state by what ``make`` makes of it; when this returns, it is kept and can be seen.

        ``make`` may raise, or return the state that it was given: nothing is changed then. Raises
        RegistryUnavailableError.
        """


class MemoryStore:
    """A state that nobody else sees and that ends with the process."""

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

    def change(self, make: Callable[[Snapshot], Snapshot]) -> Snapshot:
        with self._lock:
            self._snapshot = make(self._snapshot)
            return self._snapshot
