# SPDX-License-Identifier: Apache-2.0
"""Captured rows that were too large for an answer, until they are fetched, deleted or too old."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass


class StoreFullError(RuntimeError):
    """There is no room for more; the text says how much there is, as the client may read it."""


@dataclass(frozen=True)
class StoreLimits:
    """What an operator sets."""

    inline_bytes: int
    """Rows up to this size are part of the answer."""
    budget_bytes: int
    """Most bytes that are kept at one time."""
    expiry_seconds: float
    """How long they are kept."""
    processes: int = 1
    """How many API servers share the port: one knows nothing of what another keeps."""


class CaptureStore:
    """Bytes by unguessable id. For the event loop's thread only."""

    def __init__(self, limits: StoreLimits) -> None:
        self.limits = limits
        self._kept: dict[str, tuple[bytes, asyncio.TimerHandle]] = {}
        self._used = 0

    def __len__(self) -> int:
        return len(self._kept)

    def check_room(self, size: int) -> None:
        """Raise :class:`StoreFullError` unless ``size`` more bytes can be kept."""
        limits = self.limits
        if limits.processes > 1:
            raise StoreFullError(
                f"{size} bytes are too many for the answer, and with {limits.processes} API servers a later request "
                "might not find them; raise --capture-inline-kib, or capture to files"
            )
        if self._used + size > limits.budget_bytes:
            raise StoreFullError(
                f"{size} bytes do not fit: {self._used} of {limits.budget_bytes} (--capture-store-mib) are taken by "
                "captures that were not deleted and have not expired"
            )

    def put(self, data: bytes) -> str:
        """Keep ``data``; returns its id. Raises :class:`StoreFullError`."""
        self.check_room(len(data))
        handle = secrets.token_urlsafe(32)
        timer = asyncio.get_running_loop().call_later(self.limits.expiry_seconds, self.discard, handle)
        self._kept[handle] = data, timer
        self._used += len(data)
        return handle

    def get(self, handle: str) -> bytes | None:
        """What is kept under ``handle``, if anything is."""
        kept = self._kept.get(handle)
        return None if kept is None else kept[0]

    def discard(self, handle: str) -> bool:
        """Forget what is kept under ``handle``; returns whether there was anything."""
        data, timer = self._kept.pop(handle, (None, None))
        if data is None or timer is None:
            return False
        timer.cancel()
        self._used -= len(data)
        return True
