# SPDX-License-Identifier: Apache-2.0
"""Definitions of all metrics.

The collectors and the reference page derive from this table; the dashboard and the alerts are tested against it.

Metric names follow vLLM's form with the prefix ``vllm_steer:``. It differs from vLLM's prefix because vLLM unregisters
every collector named ``vllm:...`` when another engine starts in the same process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vllm_steer.request import KINDS, RequestForm
from vllm_steer.request.readout import KINDS as READOUT_KINDS

PREFIX = "vllm_steer:"

Type = Literal["counter", "gauge", "histogram"]

_ENGINE: dict[str, tuple[str, ...]] = {"model_name": (), "engine": ()}
_MODEL: dict[str, tuple[str, ...]] = {"model_name": ()}

TABLES = ("rows", "instructions", "vectors", "matrix_rows")
WAITING = (*TABLES, "capture", "turn")
STEP_PARTS = ("scheduler", "worker")
REQUESTS = ("plain", "steered", "captured", "steered_captured")
READOUTS = tuple(READOUT_KINDS)
GATES = ("open", "closed")
STUDIES = ("finished", "failed", "cancelled")
CELLS = ("ok", "failed")
REFUSED_FIELDS = (
    *RequestForm.__struct_fields__, "request_id", "strengths",
    "vllm_xargs", "authorization", "body", "content-type", "name", "module", "base", "prefill", "decode",
    "edits", "probes", "modules", "set", "replace", "steering registry", "capacity", "other",
)  # fmt: skip

_MICROSECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
_SECONDS = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)


@dataclass(frozen=True)
class Metric:
    """Definition of one metric.

    Attributes:
        key: Name without the prefix.
        type: Type of the collector.
        labels: Labels by name, each with all its values if these are known in advance.
        help: Description.
        multiprocess: For gauges, how the values of several API servers are aggregated.
        buckets: For histograms, upper bounds.
    """

    key: str
    type: Type
    labels: Mapping[str, tuple[str, ...]]
    help: str
    multiprocess: Literal["", "mostrecent", "livesum"] = ""
    buckets: tuple[float, ...] = field(default=())

    @property
    def name(self) -> str:
        """Full name."""
        return PREFIX + self.key


METRICS: tuple[Metric, ...] = (
    Metric("requests", "counter", {**_MODEL, "kind": REQUESTS}, "samples given to the engine"),
    Metric(
        "edits", "counter", {**_MODEL, "kind": tuple(KINDS)},
        "edits of these samples, including edits of modules and global steering",
    ),
    Metric("readouts", "counter", {**_MODEL, "kind": READOUTS}, "readouts of these samples"),
    Metric("readout_stops", "counter", _MODEL, "samples that a condition in `stop_on` has ended"),
    Metric(
        "gated_tokens", "counter", {**_MODEL, "gate": GATES},
        "generated tokens that gated edits of finished samples cover, once for each edit; `open`: the factor was not 0",
    ),
    Metric("recorded_tokens", "counter", _ENGINE, "tokens whose readouts, factors or live strengths were recorded"),
    Metric("live_changes", "counter", _MODEL, "changes of live strengths of running requests"),
    Metric("studies", "counter", {**_MODEL, "outcome": STUDIES}, "patching studies over HTTP that have ended"),
    Metric("study_cells", "counter", {**_MODEL, "outcome": CELLS}, "cells of these studies that have been run"),
    Metric(
        "refused_requests", "counter", {"status": (), "field": REFUSED_FIELDS},
        "HTTP requests refused because of their steering or capture fields, by status and invalid field; `capacity`: a "
        "valid request timed out while it waited for capacity",
    ),
    Metric("table_used", "gauge", {**_ENGINE, "table": TABLES}, "used entries of the device tables", "mostrecent"),
    Metric("table_size", "gauge", {**_ENGINE, "table": TABLES}, "size of the device tables", "mostrecent"),
    Metric("requests_admitted", "gauge", _ENGINE, "admitted steered or captured requests", "mostrecent"),
    Metric(
        "requests_waiting", "gauge", {**_ENGINE, "reason": WAITING},
        "requests that wait for admission, by the resource they wait for; `turn`: behind another waiting request",
        "mostrecent",
    ),
    Metric("requests_timed_out", "counter", _ENGINE, "requests that failed because they waited too long for admission"),
    Metric(
        "capture_booked_bytes", "gauge", _ENGINE, "capture bytes that admitted requests have reserved", "mostrecent"
    ),
    Metric("capture_limit_bytes", "gauge", _ENGINE, "most capture bytes that can be reserved (`capture_mib`)",
           "mostrecent"),
    Metric(
        "captures_given_up", "counter", _ENGINE,
        "requests that ran without their captures because `capture_mib` was used up (`capture_policy` fail)",
    ),
    Metric("captured_rows", "counter", _ENGINE, "captured rows received from the workers"),
    Metric("captured_bytes", "counter", _ENGINE, "size of the captured rows received from the workers"),
    Metric(
        "inbox_bytes", "gauge", _MODEL, "captured rows of running requests that the front ends hold", "livesum"
    ),
    Metric("staging_bytes", "gauge", _ENGINE, "pinned host buffers of the worker for captured rows", "mostrecent"),
    Metric(
        "step_seconds", "histogram", {**_ENGINE, "part": STEP_PARTS},
        "host time per engine step spent on steering and capture, in the scheduler and around the model's forward "
        "pass; steps without steered or captured requests are not counted", buckets=_MICROSECONDS,
    ),
    Metric(
        "consumer_queue", "gauge", {**_MODEL, "consumer": ()},
        "captures that are queued for a consumer or being processed by it", "livesum",
    ),
    Metric(
        "consumer_wait_seconds", "histogram", {**_MODEL, "consumer": ()},
        "time that a capture was queued for a consumer", buckets=_SECONDS,
    ),
    Metric(
        "consumer_seconds", "histogram", {**_MODEL, "consumer": ()},
        "time that a consumer spent on a capture", buckets=_SECONDS,
    ),
    Metric(
        "consumer_results", "counter", {**_MODEL, "consumer": (), "status": ("ok", "partial", "error")},
        "captures finished by consumers, by status",
    ),
    Metric("store_bytes", "gauge", {}, "captured rows waiting to be fetched from /v1/captures", "mostrecent"),
    Metric("store_limit_bytes", "gauge", {}, "limit of `store_bytes` (`--capture-store-mib`)", "mostrecent"),
    Metric("registry_modules", "gauge", _MODEL, "registered module names", "mostrecent"),
    Metric("registry_bytes", "gauge", _MODEL, "vectors of all versions of all modules", "mostrecent"),
    Metric("registry_epoch", "gauge", _MODEL, "changes of the registry and of global steering so far", "mostrecent"),
    Metric("global_steering", "gauge", _MODEL, "1 while global steering is set", "mostrecent"),
)  # fmt: skip

METRICS_BY_KEY: Mapping[str, Metric] = {metric.key: metric for metric in METRICS}
