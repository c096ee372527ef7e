# SPDX-License-Identifier: Apache-2.0
"""The metrics of this process as vLLM's ``Metric`` objects, for ``LLM.get_metrics``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY

from vllm_steer.compat.internals import Counter, Gauge, Histogram, Metric
from vllm_steer.metrics.definitions import PREFIX


def read_metrics() -> list[Metric]:
    """Return every steering metric that has a value, one object per combination of label values."""
    families = (family for family in REGISTRY.collect() if family.name.startswith(PREFIX))
    return [metric for family in families for metric in _metrics(family)]


def _metrics(family: Any) -> Iterator[Metric]:
    match family.type:
        case "counter":
            for sample in family.samples:
                if sample.name == f"{family.name}_total":
                    yield Counter(name=family.name, labels=sample.labels, value=int(sample.value))
        case "gauge":
            for sample in family.samples:
                yield Gauge(name=family.name, labels=sample.labels, value=sample.value)
        case "histogram":
            yield from _histograms(family)


def _histograms(family: Any) -> Iterator[Histogram]:
    buckets: dict[str, int] = {}
    count = 0
    # For each combination of labels, prometheus_client yields the buckets, then the count, then the sum.
    for sample in family.samples:
        if sample.name == f"{family.name}_bucket":
            buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name == f"{family.name}_count":
            count = int(sample.value)
        elif sample.name == f"{family.name}_sum":
            yield Histogram(name=family.name, labels=sample.labels, count=count, sum=sample.value, buckets=buckets)
            buckets = {}
