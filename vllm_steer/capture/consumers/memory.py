# SPDX-License-Identifier: Apache-2.0
"""The consumer that gives the rows back with the request's output."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from vllm_steer.capture.consumers.base import Consumer
from vllm_steer.capture.results import CapturedRequest
from vllm_steer.errors import SteeringError
from vllm_steer.spec import CaptureSpec

STREAM = "stream"


class MemoryConsumer(Consumer):
    """Rows come back on ``RequestOutput.capture_results["memory"]``; it keeps nothing itself.

    With the option ``stream``, each piece of a stream (``RequestOutputKind.DELTA``) also has the rows that are new, on
    ``CompletionOutput.capture_rows["memory"]``, by site.
    """

    name: ClassVar[str] = "memory"
    spec_options: ClassVar[Mapping[str, Any]] = MappingProxyType({STREAM: bool})

    def check(self, spec: CaptureSpec, field: str) -> None:
        """Also refuses a stream of what exists only at the end."""
        super().check(spec, field)
        if spec.options.get(STREAM) and spec.reduce in ("mean", "last"):
            raise SteeringError(f"{field}.{STREAM}", f"rows that are reduced to their {spec.reduce} come at the end")

    def accept(self, captured: CapturedRequest) -> CapturedRequest:
        """The rows themselves."""
        return captured


def is_streamed(name: str, spec: CaptureSpec) -> bool:
    """Whether rows are to come while the request runs."""
    return name == MemoryConsumer.name and bool(spec.options.get(STREAM))
