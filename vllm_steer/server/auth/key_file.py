# SPDX-License-Identifier: Apache-2.0
"""A server's view of the file of keys: what it says now, or, while it is broken, what it said last."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

from vllm_steer import audit
from vllm_steer.errors import SteeringError
from vllm_steer.log import steering_logger
from vllm_steer.server.auth.keys import Key, find, read_keys

logger = steering_logger(__name__)

QUIET_SECONDS = 5.0
"""How long a file that cannot be read for now is not complained of again."""
_NO_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO})
"""Why nothing is opened where there is no file, or something that is no regular one."""
_Identity = tuple[int, int, int, int, int]


class KeyFile:
    """The keys of one file, followed through its changes. For any thread."""

    def __init__(self, path: str | Path) -> None:
        """Read it; raises SteeringError."""
        self._path = Path(path)
        self._lock = threading.Lock()
        self._complained = float("-inf")
        self._seen = self._identity()
        self._keys = read_keys(self._path)

    def find(self, secret: str) -> Key | None:
        """The key that ``secret`` is, if it is one."""
        return find(self._keys, secret)

    def is_stale(self) -> bool:
        """Whether the file is another than the one that was read; one ``stat``."""
        return self._identity() != self._seen

    def refresh(self) -> None:
        """Read what is new, or keep the keys that there were.

        A file that is wrong is complained of once, and left alone until it changes. One that cannot be read for now,
        as where descriptors have run out, may be right: it stays new, and is tried again next time.
        """
        with self._lock:
            # Before it is read: a change that comes in between is seen next time.
            seen = self._identity()
            if seen == self._seen:
                return
            try:
                self._keys = read_keys(self._path)
            except SteeringError as error:
                if _may_pass(error):
                    self._complain_at_times(error)
                    return
                self._seen = seen
                logger.error("The file of API keys was not taken over, and the keys stay as they were: %s", error)
            else:
                self._seen = seen
                logger.info("API keys read again: %d", len(self._keys))
                audit.record_keys(self._path)

    def _complain_at_times(self, error: SteeringError) -> None:
        now = time.monotonic()
        if now - self._complained >= QUIET_SECONDS:
            self._complained = now
            logger.error("The file of API keys has changed and cannot be read; it is tried again: %s", error)

    def _identity(self) -> _Identity | None:
        try:
            status = self._path.lstat()
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _may_pass(error: SteeringError) -> bool:
    """Whether `read_keys` met a failure of the system, which says nothing about the file."""
    # It raises its own error in place of the system's, which is the context then.
    cause = error.__context__ if error.__suppress_context__ else None
    return isinstance(cause, OSError) and cause.errno not in _NO_FILE
