# SPDX-License-Identifier: Apache-2.0
"""Layouts with many requests per file: a stream is ended when it is full or old enough, and the next one is begun."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vllm_steer.capture.consumers.base import THREAD_PREFIX
from vllm_steer.capture.files.directory import CaptureDirectory, CaptureWriteError
from vllm_steer.capture.files.layouts import FileLayout, LayoutName, timestamped_stem
from vllm_steer.capture.files.stream import END_OF_STREAM, SUFFIX, StreamEncoder
from vllm_steer.capture.results import CapturedRequest

logger = logging.getLogger("vllm_steer.capture")


@dataclass(frozen=True, slots=True)
class RotationLimits:
    """Limits at which a stream is ended, whichever is reached first; None for no limit."""

    max_requests: int | None
    max_size: int | None
    """Size of the file in bytes. The request that reaches the limit may exceed it by far."""
    max_seconds: float | None
    """Age of the file, since its first request."""


ROTATION_LIMITS: Mapping[LayoutName, RotationLimits] = MappingProxyType(
    {
        "packed": RotationLimits(max_requests=256, max_size=256 << 20, max_seconds=10.0),
        "sharded": RotationLimits(max_requests=None, max_size=1 << 30, max_seconds=300.0),
    }
)
"""Default limits of the layouts with many requests per file."""


class StreamWriter:
    """A stream under construction."""

    def __init__(self, directory: CaptureDirectory, stem: str) -> None:
        self._encoder = StreamEncoder()
        self.file = directory.create(stem, SUFFIX, hidden=False)
        self.num_requests = 0

    def append(self, captured: CapturedRequest, run: str | None) -> int:
        """Append one request and return its number in the file.

        Raises:
            CaptureWriteError: The request cannot be written. The file has the earlier requests.
        """
        self.file.append(self._encoder.encode(captured, run))
        self.file.sync()
        self.num_requests += 1
        return self.num_requests - 1

    def seal(self) -> None:
        """End the stream, or remove the file if it is empty. Its requests stay readable if this fails."""
        if not self.num_requests:
            self.file.discard()
            return
        try:
            self.file.append([END_OF_STREAM])
            self.file.sync()
        except CaptureWriteError as error:
            logger.warning("%s is complete, but its end is not marked: %s", self.file.path, error)
        self.file.close()


class RotatingLayout(FileLayout):
    """A layout that appends to one open stream and ends it at its limits, even if no further request arrives."""

    def __init__(
        self, directory: CaptureDirectory, name: LayoutName, limits: RotationLimits, run: str | None = None
    ) -> None:
        self._directory = directory
        self._name = name
        self._limits = limits
        self._run = run
        self._lock = threading.Lock()
        self._file: StreamWriter | None = None
        self._timer: threading.Timer | None = None
        self._last_opened = 0

    def write(self, captured: CapturedRequest) -> dict[str, Any]:
        """Append one request, which can be read when this returns."""
        with self._lock:
            if self._file is not None and not self._file.file.is_in_place():
                self._seal()
            file = self._file or self._open()
            try:
                index = file.append(captured, self._run)
            except BaseException:
                self._seal()
                raise
            sealed = self._is_full(file)
            if sealed:
                self._seal()
            return {"path": str(file.file.path), "index": index, "sealed": sealed}

    def close(self) -> None:
        """End the open stream, if any."""
        with self._lock:
            self._seal()

    def _open(self) -> StreamWriter:
        # Readers sort files by name: names must ascend even if the clock is set back.
        self._last_opened = max(time.time_ns(), self._last_opened + 1)
        file = self._file = StreamWriter(self._directory, timestamped_stem(self._name, self._last_opened))
        if self._limits.max_seconds is not None:
            self._timer = threading.Timer(self._limits.max_seconds, self._expire, (file,))
            self._timer.daemon = True
            self._timer.name = f"{THREAD_PREFIX}timer"
            self._timer.start()
        return file

    def _is_full(self, file: StreamWriter) -> bool:
        requests, size = self._limits.max_requests, self._limits.max_size
        return (requests is not None and file.num_requests >= requests) or (size is not None and file.file.size >= size)

    def _expire(self, file: StreamWriter) -> None:
        with self._lock:
            if self._file is file:
                self._seal()

    def _seal(self) -> None:
        file, self._file = self._file, None
        if self._timer is not None:
            self._timer.cancel()
        if file is not None:
            file.seal()
