# SPDX-License-Identifier: Apache-2.0
"""Statistics of steps: of a worker, and those that an engine sends to the front end.

vLLM sends its scheduler's statistics with the outputs of a step, to one of the front ends. Ours use the free-form field
``kv_connector_stats``, under a key of their own, beside the statistics of a KV connector. The front end removes them
before vLLM's loggers read the field (:class:`~vllm_steer.metrics.stat_logger.SteeringStatLogger`). With
``disable_log_stats``, no statistics are sent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

STATS_KEY = "__steer_stats__"


class WorkerStats(NamedTuple):
    """Host time and pinned memory that steering and capture used in one step of a worker."""

    seconds: float
    """Host time spent around the model's forward pass."""
    staging_bytes: int
    """Size of the pooled pinned buffers for captured rows."""


class TableUsage(msgspec.Struct, frozen=True, array_like=True):
    """Resources that admitted requests hold, and requests that wait for resources."""

    tables: tuple[int, int, int, int]
    """Rows, instructions and vectors in use."""
    admitted: int
    """Admitted steered or captured requests."""
    reserved_rows: int
    """Captured rows that admitted requests have reserved."""
    waiting: dict[str, int]
    """Waiting requests by reason."""


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Statistics of one step in which requests were steered or captured; the counts are since the last report."""

    usage: TableUsage | None
    """None if unchanged since the last report."""
    staging_bytes: int
    timed_out: int
    given_up: int
    captured_rows: int
    captured_bytes: int
    recorded_tokens: int
    scheduler_seconds: float
    worker_seconds: float | None
    """None if the worker neither steered nor captured in this step."""


def attach_stats(scheduler_stats: Any, stats: EngineStats) -> None:
    """Add ``stats`` to vLLM's scheduler statistics."""
    # A new dict: the KV connector may keep a reference to its own.
    scheduler_stats.kv_connector_stats = {**(scheduler_stats.kv_connector_stats or {}), STATS_KEY: stats}


def pop_stats(scheduler_stats: Any) -> EngineStats | None:
    """Remove and return our part of vLLM's scheduler statistics, None if there is none."""
    connector_stats = scheduler_stats.kv_connector_stats
    if not connector_stats or STATS_KEY not in connector_stats:
        return None
    connector_stats = dict(connector_stats)
    stats = connector_stats.pop(STATS_KEY)
    scheduler_stats.kv_connector_stats = connector_stats or None
    return stats if isinstance(stats, EngineStats) else msgspec.convert(stats, EngineStats)
