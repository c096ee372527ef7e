# SPDX-License-Identifier: Apache-2.0
"""The table's metrics in ``prometheus_client``'s registry, where vLLM's own are.

Collectors belong to the process, as that registry does. They are made where a front end of a steering engine starts;
everywhere else there are none, and to count is to do nothing. With several API servers vLLM sets
``PROMETHEUS_MULTIPROC_DIR``: values are then files that any of the processes can put together at ``/metrics``.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from vllm_steer.metrics.table import BY_SHORT, METRICS, Metric

_collectors: dict[str, Any] = {}
# Those with labels, of which there are few: prometheus_client looks at labels one by one, for every request anew.
_children: dict[tuple[str, ...], Any] = {}


def start(known: Mapping[str, tuple[str, ...]]) -> None:
    """Make the collectors, unless there are any, with a zero wherever all values of a metric's labels are known.

    ``known``: the values of ``model_name`` and ``engine`` in this process.
    """
    for metric in METRICS:
        if metric.short not in _collectors:
            _collectors[metric.short] = _make(metric)
            _children.clear()
        values = [given or known.get(label, ()) for label, given in metric.labels.items()]
        if metric.labels and metric.type != "gauge":  # a gauge that nobody has set is not known to be 0
            for each in product(*values):
                _collectors[metric.short].labels(*each)


def _make(metric: Metric) -> Any:
    about = (metric.name, metric.help, tuple(metric.labels))
    match metric.type:
        case "counter":
            return Counter(*about)
        case "gauge":
            return Gauge(*about, multiprocess_mode=metric.multiprocess or "mostrecent")
        case "histogram":
            return Histogram(*about, buckets=metric.buckets)


def child(short: str, **labels: str) -> Any:
    """The collector of one metric with these labels; None where nothing is counted."""
    collector = _collectors.get(short)
    if collector is None:
        if short not in BY_SHORT:
            raise KeyError(short)
        return None
    if not labels:
        return collector
    key = (short, *labels, *labels.values())
    if key not in _children:
        _children[key] = collector.labels(**labels)
    return _children[key]


def add(short: str, amount: float = 1, **labels: str) -> None:
    """Count a counter up, or a gauge by ``amount``."""
    counter = child(short, **labels)
    if counter is not None:
        counter.inc(amount)


def set_gauge(short: str, value: float, **labels: str) -> None:
    """Set a gauge."""
    gauge = child(short, **labels)
    if gauge is not None:
        gauge.set(value)


def observe(short: str, value: float, **labels: str) -> None:
    """Add an observation to a histogram."""
    histogram = child(short, **labels)
    if histogram is not None:
        histogram.observe(value)
