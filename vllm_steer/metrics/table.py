# SPDX-License-Identifier: Apache-2.0
"""Every metric: the one table that the collectors, the reference page, the dashboard and the alerts derive from.

Names are vLLM's way, ``vllm_steer:...``, so that both stand side by side wherever metrics are listed; the prefix is not
vLLM's own, since vLLM removes every collector under ``vllm:`` when another engine starts in a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vllm_steer.spec import KINDS

PREFIX = "vllm_steer:"

Type = Literal["counter", "gauge", "histogram"]

_ENGINE: dict[str, tuple[str, ...]] = {"model_name": (), "engine": ()}
_MODEL: dict[str, tuple[str, ...]] = {"model_name": ()}

TABLES = ("rows", "instructions", "vectors")
WAITING = (*TABLES, "capture", "turn")
STEP_PARTS = ("scheduler", "worker")
REQUESTS = ("plain", "steered", "captured", "steered_captured")
REFUSED_FIELDS = (
    "steering_vectors", "prefill_steering_vectors", "decode_steering_vectors", "steering", "steering_modules",
    "capture", "vllm_xargs", "authorization", "body", "content-type", "name", "module", "base", "prefill", "decode",
    "edits", "probes", "modules", "set", "replace", "steering registry", "capacity", "other",
)  # fmt: skip

_MICROSECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
_SECONDS = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)


@dataclass(frozen=True)
class Metric:
    """One metric."""

    short: str
    type: Type
    labels: Mapping[str, tuple[str, ...]]
    """By name; with all values that there are, where those are known."""
    help: str
    multiprocess: Literal["", "mostrecent", "livesum"] = ""
    """Of a gauge: how the values that several API servers have become one."""
    buckets: tuple[float, ...] = field(default=())

    @property
    def name(self) -> str:
        return PREFIX + self.short

    @property
    def series(self) -> Mapping[str, frozenset[str]]:
        """What is scraped of it: labels by name."""
        labels = frozenset(self.labels)
        match self.type:
            case "counter":
                return {f"{self.name}_total": labels}
            case "gauge":
                return {self.name: labels}
            case "histogram":
                return {
                    f"{self.name}_bucket": labels | {"le"},
                    f"{self.name}_sum": labels,
                    f"{self.name}_count": labels,
                }


METRICS: tuple[Metric, ...] = (
    Metric("requests", "counter", {**_MODEL, "kind": REQUESTS}, "samples given to the engine, by what they ask for"),
    Metric("edits", "counter", {**_MODEL, "kind": tuple(KINDS)}, "their edits, those of modules and global ones too"),
    Metric(
        "refused_requests", "counter", {"status": (), "field": REFUSED_FIELDS},
        "HTTP requests refused for their steering or capture, by status and by the field that was wrong; `capacity`: "
        "none was, but there was no room",
    ),
    Metric("table_used", "gauge", {**_ENGINE, "table": TABLES}, "places taken in the device tables", "mostrecent"),
    Metric("table_size", "gauge", {**_ENGINE, "table": TABLES}, "places in the device tables", "mostrecent"),
    Metric("requests_admitted", "gauge", _ENGINE, "steered or captured requests that hold their places", "mostrecent"),
    Metric(
        "requests_waiting", "gauge", {**_ENGINE, "reason": WAITING},
        "requests that wait for places, by what there is too little of; `turn`: behind another one that waits",
        "mostrecent",
    ),
    Metric(
        "requests_timed_out", "counter", _ENGINE, "requests that ended because they had waited for places too long",
    ),
    Metric("capture_booked_bytes", "gauge", _ENGINE, "most that admitted requests can come to capture", "mostrecent"),
    Metric("capture_limit_bytes", "gauge", _ENGINE, "most that may be booked (`capture_mib`)", "mostrecent"),
    Metric(
        "captures_given_up", "counter", _ENGINE,
        "requests that ran without their captures for lack of room (`capture_policy` fail)",
    ),
    Metric("captured_rows", "counter", _ENGINE, "captured rows that came from the workers"),
    Metric("captured_bytes", "counter", _ENGINE, "bytes of those rows"),
    Metric("inbox_bytes", "gauge", _MODEL, "captured rows that front ends keep for running requests", "livesum"),
    Metric("staging_bytes", "gauge", _ENGINE, "pinned host buffers that the worker keeps for rows", "mostrecent"),
    Metric(
        "step_seconds", "histogram", {**_ENGINE, "part": STEP_PARTS},
        "host time that steering and capture take of an engine step that has any, in the scheduler's process and "
        "around the model's forward pass", buckets=_MICROSECONDS,
    ),
    Metric(
        "consumer_queue", "gauge", {**_MODEL, "consumer": ()},
        "captures that wait for their consumer or are in its hands", "livesum",
    ),
    Metric(
        "consumer_wait_seconds", "histogram", {**_MODEL, "consumer": ()},
        "how long a capture waited for its consumer", buckets=_SECONDS,
    ),
    Metric(
        "consumer_seconds", "histogram", {**_MODEL, "consumer": ()},
        "how long its consumer worked on a capture", buckets=_SECONDS,
    ),
    Metric(
        "consumer_results", "counter", {**_MODEL, "consumer": (), "status": ("ok", "partial", "error")},
        "captures that consumers have reported on, by status",
    ),
    Metric("store_bytes", "gauge", {}, "captured rows that wait to be fetched from /v1/captures", "mostrecent"),
    Metric("store_limit_bytes", "gauge", {}, "most that may wait there (`--capture-store-mib`)", "mostrecent"),
    Metric("registry_modules", "gauge", _MODEL, "registered names", "mostrecent"),
    Metric("registry_bytes", "gauge", _MODEL, "vectors of all versions of all modules", "mostrecent"),
    Metric("registry_epoch", "gauge", _MODEL, "changes of the registry and of global steering so far", "mostrecent"),
    Metric("global_steering", "gauge", _MODEL, "1 while global steering is set", "mostrecent"),
)  # fmt: skip

BY_SHORT: Mapping[str, Metric] = {metric.short: metric for metric in METRICS}
