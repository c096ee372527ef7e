# SPDX-License-Identifier: Apache-2.0
"""Loggers that write through vLLM's log handlers, the only ones that a vLLM server installs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from vllm_steer.compat.internals import init_logger


def steering_logger(name: str) -> Any:
    """Return the logger for the module ``name``."""
    return init_logger(f"vllm.{name}")


class LimitedLog:
    """Logs errors that can come with every request: at most one in each interval for each key. Thread-safe.

    Args:
        logger: The logger.
        interval: Seconds between two messages of a key.
        clock: Returns the time in seconds.
    """

    MAX_KEYS = 64
    """Keys with an interval of their own; later keys share one."""

    def __init__(self, logger: Any, interval: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._interval, self._clock = logger, interval, clock
        self._lock = threading.Lock()
        self._logged: dict[str, tuple[float, int]] = {}

    def error(self, key: str, message: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Log an error, or count it if one with the same key was logged a short time ago."""
        with self._lock:
            if key not in self._logged and len(self._logged) >= self.MAX_KEYS:
                key = ""
            now = self._clock()
            logged, omitted = self._logged.get(key, (now - self._interval, 0))
            if now - logged < self._interval:
                self._logged[key] = logged, omitted + 1
                return
            self._logged[key] = now, 0
        if omitted:
            message, args = f"{message} (%d similar errors were not logged)", (*args, omitted)
        self._logger.error(message, *args, exc_info=exc_info)
