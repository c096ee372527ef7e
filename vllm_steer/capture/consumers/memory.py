# SPDX-License-Identifier: Apache-2.0
"""The consumer that gives the rows back with the request's output."""

from __future__ import annotations

from typing import ClassVar

from vllm_steer.capture.consumers.base import Consumer
from vllm_steer.capture.result import CapturedRequest


class MemoryConsumer(Consumer):
    """Rows come back on ``RequestOutput.capture_results["memory"]``; it keeps nothing itself."""

    name: ClassVar[str] = "memory"

    def accept(self, captured: CapturedRequest) -> CapturedRequest:
        """The rows themselves."""
        return captured
