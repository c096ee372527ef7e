# SPDX-License-Identifier: Apache-2.0
"""Consumer that returns the rows with the request's output."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from vllm_steer.capture.consumers.base import Consumer
from vllm_steer.capture.results import CapturedRequest
from vllm_steer.errors import SteeringError
from vllm_steer.request import CaptureSpec

STREAM = "stream"


class MemoryConsumer(Consumer):
    """Returns rows on ``RequestOutput.capture_results["memory"]``.

    With the option ``stream``, each delta of a stream (``RequestOutputKind.DELTA``) also has its new rows by site on
    ``CompletionOutput.capture_rows["memory"]``.
    """

    name: ClassVar[str] = "memory"
    spec_options: ClassVar[Mapping[str, Any]] = MappingProxyType({STREAM: bool})

    def check(self, spec: CaptureSpec, field: str) -> None:
        """Also reject streams of reductions, which are only known at the end."""
        super().check(spec, field)
        if spec.options.get(STREAM) and spec.reduce in ("mean", "last"):
            raise SteeringError(f"{field}.{STREAM}", f"rows with reduce '{spec.reduce}' cannot be streamed")

    def accept(self, captured: CapturedRequest) -> CapturedRequest:
        """Return the rows unchanged."""
        return captured


def is_streamed(name: str, spec: CaptureSpec) -> bool:
    """Return whether a consumer's rows are requested while the request runs."""
    return name == MemoryConsumer.name and bool(spec.options.get(STREAM))
