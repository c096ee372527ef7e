# SPDX-License-Identifier: Apache-2.0
"""A server's view of the file of keys: what it says now, or, while it is broken, what it said last."""

from __future__ import annotations

import threading
from pathlib import Path

from vllm_steer import audit
from vllm_steer.errors import SteeringError
from vllm_steer.log import steering_logger
from vllm_steer.serve.keys import Key, find, read_keys

logger = steering_logger(__name__)

_Identity = tuple[int, int, int, int, int]


class KeyFile:
    """The keys of one file, followed through its changes. For any thread."""

    def __init__(self, path: str | Path) -> None:
        """Read it; raises SteeringError."""
        self._path = Path(path)
        self._lock = threading.Lock()
        self._seen = self._identity()
        self._keys = read_keys(self._path)

    def find(self, secret: str) -> Key | None:
        """The key that ``secret`` is, if it is one."""
        return find(self._keys, secret)

    def is_stale(self) -> bool:
        """Whether the file is another than the one that was read; one ``stat``."""
        return self._identity() != self._seen

    def refresh(self) -> None:
        """Read what is new. What cannot be read is said once, and the keys stay those that they were."""
        with self._lock:
            # Before it is read: a change that comes in between is seen next time.
            seen = self._identity()
            if seen == self._seen:
                return
            self._seen = seen
            try:
                self._keys = read_keys(self._path)
            except SteeringError as error:
                logger.error("The file of API keys was not taken over, and the keys stay as they were: %s", error)
            else:
                logger.info("API keys read again: %d", len(self._keys))
                audit.record_keys(self._path)

    def _identity(self) -> _Identity | None:
        try:
            status = self._path.lstat()
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
