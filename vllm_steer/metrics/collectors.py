# SPDX-License-Identifier: Apache-2.0
"""Collectors of the metrics in ``prometheus_client``'s default registry, which vLLM uses too.

The registry and the collectors belong to the process. Collectors are created when a front end of a steering engine
starts; in all other processes, counting has no effect. With several API servers, vLLM sets
``PROMETHEUS_MULTIPROC_DIR``; values are then stored in files, which any of the processes aggregates for ``/metrics``.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from vllm_steer.metrics.definitions import METRICS, METRICS_BY_KEY, Metric

_collectors: dict[str, Any] = {}
# prometheus_client's labels() validates the labels on every call; the few combinations that occur are cached.
_children: dict[tuple[str, ...], Any] = {}


def start(label_values: Mapping[str, tuple[str, ...]]) -> None:
    """Create the collectors, unless they exist, and set counters and histograms to zero for all known label values.

    Gauges are left unset, since an unknown value is not zero.

    Args:
        label_values: The values of ``model_name`` and ``engine`` in this process.
    """
    for metric in METRICS:
        if metric.key not in _collectors:
            _collectors[metric.key] = _create(metric)
            _children.clear()
        if metric.labels and metric.type != "gauge":
            values = [given or label_values.get(label, ()) for label, given in metric.labels.items()]
            for combination in product(*values):
                _collectors[metric.key].labels(*combination)


def _create(metric: Metric) -> Any:
    arguments = (metric.name, metric.help, tuple(metric.labels))
    match metric.type:
        case "counter":
            return Counter(*arguments)
        case "gauge":
            return Gauge(*arguments, multiprocess_mode=metric.multiprocess or "mostrecent")
        case "histogram":
            return Histogram(*arguments, buckets=metric.buckets)


def collector(key: str, **labels: str) -> Any:
    """Return the collector of a metric with these labels, or None if :func:`start` was not called.

    Raises:
        KeyError: There is no such metric.
    """
    parent = _collectors.get(key)
    if parent is None:
        if key not in METRICS_BY_KEY:
            raise KeyError(key)
        return None
    if not labels:
        return parent
    child_key = (key, *labels, *labels.values())
    if child_key not in _children:
        _children[child_key] = parent.labels(**labels)
    return _children[child_key]


def add(key: str, amount: float = 1, **labels: str) -> None:
    """Add ``amount`` to a counter or gauge."""
    counter = collector(key, **labels)
    if counter is not None:
        counter.inc(amount)


def set_gauge(key: str, value: float, **labels: str) -> None:
    """Set a gauge."""
    gauge = collector(key, **labels)
    if gauge is not None:
        gauge.set(value)


def observe(key: str, value: float, **labels: str) -> None:
    """Add an observation to a histogram."""
    histogram = collector(key, **labels)
    if histogram is not None:
        histogram.observe(value)


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
