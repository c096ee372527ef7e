# SPDX-License-Identifier: Apache-2.0
"""How far behind a consumer of captures is."""

from __future__ import annotations

from vllm_steer.metrics.collectors import add, observe, set_gauge


class ConsumerMeter:
    """Of one consumer of one engine client; for any thread."""

    def __init__(self, model_name: str, consumer: str) -> None:
        self._labels = {"model_name": model_name, "consumer": consumer}
        set_gauge("consumer_queue", 0, **self._labels)
        for status in ("ok", "partial", "error"):
            add("consumer_results", 0, **self._labels, status=status)

    def queued(self) -> None:
        """It has been given a capture."""
        add("consumer_queue", 1, **self._labels)

    def reported(self, status: str, waited: float, worked: float) -> None:
        """It has reported on one, after these seconds of waiting and of work."""
        add("consumer_queue", -1, **self._labels)
        observe("consumer_wait_seconds", waited, **self._labels)
        observe("consumer_seconds", worked, **self._labels)
        add("consumer_results", 1, **self._labels, status=status)
