# SPDX-License-Identifier: Apache-2.0
"""The API keys of a running server, which follow changes of the key file."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

from vllm_steer import audit
from vllm_steer.errors import SteeringError
from vllm_steer.log import steering_logger
from vllm_steer.server.auth.key_file import read_keys
from vllm_steer.server.auth.keys import Key, find_key

logger = steering_logger(__name__)

LOG_INTERVAL_SECONDS = 5.0
"""Minimum interval between log messages about a file that cannot be read."""
_PERMANENT_ERRORS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO})
"""Errors of opening a path that is not a regular file. All others may be temporary."""
_FileStamp = tuple[int, int, int, int, int]


class KeyFileWatcher:
    """Keys of a file, reloaded when it changes. Thread-safe.

    While the file is invalid or cannot be read, the last valid keys stay in effect.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the file; raises ``SteeringError`` if it is invalid."""
        self._path = Path(path)
        self._lock = threading.Lock()
        self._logged_at = float("-inf")
        self._read_stamp = self._stamp()
        self._keys = read_keys(self._path)

    def find(self, secret: str) -> Key | None:
        """Return the key with that secret, if there is one."""
        return find_key(self._keys, secret)

    def is_stale(self) -> bool:
        """Return whether the file has changed since it was read; one ``stat`` call."""
        return self._stamp() != self._read_stamp

    def refresh(self) -> None:
        """Read the file if it has changed.

        An invalid file is logged once and not read again until it changes. After a temporary error, for example when
        the process has run out of file descriptors, the next call tries again.
        """
        with self._lock:
            # Before reading: the next call detects a change during the read.
            stamp = self._stamp()
            if stamp == self._read_stamp:
                return
            try:
                self._keys = read_keys(self._path)
            except SteeringError as error:
                if _is_temporary(error):
                    self._log_temporary(error)
                    return
                self._read_stamp = stamp
                logger.error("Keeping the previous API keys: the changed key file is invalid: %s", error)
            else:
                self._read_stamp = stamp
                logger.info("Reloaded %d API keys", len(self._keys))
                audit.record_keys(self._path)

    def _log_temporary(self, error: SteeringError) -> None:
        now = time.monotonic()
        if now - self._logged_at >= LOG_INTERVAL_SECONDS:
            self._logged_at = now
            logger.error("The API key file has changed but cannot be read; retrying: %s", error)

    def _stamp(self) -> _FileStamp | None:
        try:
            status = self._path.lstat()
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _is_temporary(error: SteeringError) -> bool:
    # `read_keys` raises its error from None while handling the OSError, which is therefore the context.
    cause = error.__context__ if error.__suppress_context__ else None
    return isinstance(cause, OSError) and cause.errno not in _PERMANENT_ERRORS
