# SPDX-License-Identifier: Apache-2.0
"""Layouts with many requests per file: a file is sealed when it is full or old enough, and the next one is opened."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vllm_steer.capture.consumers.base import THREAD_PREFIX
from vllm_steer.capture.files.directory import CaptureDirectory, CaptureWriteError
from vllm_steer.capture.files.layouts import FileLayout, LayoutName
from vllm_steer.capture.files.packed_file import PackedFile, site_blocks
from vllm_steer.capture.results import CapturedRequest

logger = logging.getLogger("vllm_steer.capture")


@dataclass(frozen=True, slots=True)
class RotationLimits:
    """Limits at which a file is sealed, whichever is reached first; None for no limit."""

    max_requests: int | None
    max_size: int | None
    """Bytes of rows and tokens. The request that reaches the limit may exceed it by far."""
    max_seconds: float | None
    """Age of the file, since its first request."""


ROTATION_LIMITS: Mapping[LayoutName, RotationLimits] = MappingProxyType(
    {
        "packed": RotationLimits(max_requests=256, max_size=256 << 20, max_seconds=10.0),
        "sharded": RotationLimits(max_requests=None, max_size=1 << 30, max_seconds=300.0),
    }
)
"""Default limits of the layouts with many requests per file."""


class RotatingLayout(FileLayout):
    """A layout that appends to one open file and seals it at its limits, even if no further request arrives."""

    def __init__(self, directory: CaptureDirectory, name: LayoutName, limits: RotationLimits) -> None:
        self._directory = directory
        self._name = name
        self._limits = limits
        self._lock = threading.Lock()
        self._file: PackedFile | None = None
        self._timer: threading.Timer | None = None
        self._last_opened = 0

    def write(self, captured: CapturedRequest, tag: str | None) -> dict[str, Any]:
        """Append one request. On return, the disk space for sealing the file is reserved."""
        blocks = site_blocks(captured)
        with self._lock:
            if self._file is not None and not (self._file.has_room(blocks) and self._file.is_in_root()):
                self._seal_or_log()
            file = self._file or self._open()
            try:
                index = file.append(captured, blocks, tag)
            except CaptureWriteError:
                # The requests in the open file were reported as ok: seal it before anything else fails.
                self._seal_or_log()
                raise
            sealed = self._is_full(file)
            if sealed:
                self._seal()
            return {"path": str(file.path), "index": index, "sealed": sealed}

    def close(self) -> None:
        """Seal the open file, if any."""
        with self._lock:
            self._seal()

    def _open(self) -> PackedFile:
        # Readers sort files by name: names must ascend even if the clock is set back.
        self._last_opened = max(time.time_ns(), self._last_opened + 1)
        file = self._file = PackedFile(self._directory, timestamped_stem(self._name, self._last_opened))
        if self._limits.max_seconds is not None:
            self._timer = threading.Timer(self._limits.max_seconds, self._expire, (file,))
            self._timer.daemon = True
            self._timer.name = f"{THREAD_PREFIX}timer"
            self._timer.start()
        return file

    def _is_full(self, file: PackedFile) -> bool:
        requests, size = self._limits.max_requests, self._limits.max_size
        return (requests is not None and file.num_requests >= requests) or (size is not None and file.size >= size)

    def _expire(self, file: PackedFile) -> None:
        with self._lock:
            if self._file is file:
                self._seal_or_log()

    def _seal_or_log(self) -> None:
        try:
            self._seal()
        except CaptureWriteError:
            return  # logged by _seal; no caller waits for this file

    def _seal(self) -> None:
        file, self._file = self._file, None
        if self._timer is not None:
            self._timer.cancel()
        if file is None:
            return
        try:
            file.seal()
        except Exception as error:
            logger.error("%s is lost, with captures of %d requests: %s", file.path, file.num_requests, error)
            raise


def timestamped_stem(name: str, time_ns: int) -> str:
    """Return an unguessable file name without suffix that sorts by time.

    Args:
        name: Layout name.
        time_ns: Nanoseconds since 1970.
    """
    seconds, nanoseconds = divmod(time_ns, 10**9)
    stamp = time.strftime("%Y%m%dt%H%M%S", time.gmtime(seconds))
    return f"{name}-{stamp}-{nanoseconds:09d}-{secrets.token_hex(4)}"
