# SPDX-License-Identifier: Apache-2.0
"""Metrics of capture consumers."""

from __future__ import annotations

from vllm_steer.metrics.collectors import add, observe, set_gauge


class ConsumerMetrics:
    """Metrics of one consumer of one front end. Thread-safe."""

    def __init__(self, model_name: str, consumer: str) -> None:
        self._labels = {"model_name": model_name, "consumer": consumer}
        set_gauge("consumer_queue", 0, **self._labels)
        for status in ("ok", "partial", "error"):
            add("consumer_results", 0, **self._labels, status=status)

    def queued(self) -> None:
        """Count a capture that was queued for the consumer."""
        add("consumer_queue", 1, **self._labels)

    def reported(self, status: str, waited: float, worked: float) -> None:
        """Count a capture that the consumer has finished.

        Args:
            status: The consumer's result: "ok", "partial" or "error".
            waited: Seconds that the capture was queued.
            worked: Seconds that the consumer worked on it.
        """
        add("consumer_queue", -1, **self._labels)
        observe("consumer_wait_seconds", waited, **self._labels)
        observe("consumer_seconds", worked, **self._labels)
        add("consumer_results", 1, **self._labels, status=status)
