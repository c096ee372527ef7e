# SPDX-License-Identifier: Apache-2.0
"""A stat logger of vLLM that sets the engine metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_steer.compat.internals import AggregateStatLoggerBase
from vllm_steer.config import SteeringConfig, from_vllm_config
from vllm_steer.metrics.collectors import collector, start
from vllm_steer.metrics.definitions import STEP_PARTS, TABLES, WAITING
from vllm_steer.metrics.engine_stats import EngineStats, TableUsage, pop_stats

_COUNTERS = {
    "timed_out": "requests_timed_out",
    "given_up": "captures_given_up",
    "captured_rows": "captured_rows",
    "captured_bytes": "captured_bytes",
    "recorded_tokens": "recorded_tokens",
}
"""Metrics by the field of :class:`EngineStats` that they count."""


def install_stat_logger(manager: Any, vllm_config: Any) -> None:
    """Insert our logger ahead of vLLM's if steering is enabled, since it removes statistics that vLLM cannot parse."""
    config = from_vllm_config(vllm_config)
    if config is not None:
        manager.stat_loggers.insert(0, SteeringStatLogger(vllm_config, manager.engine_indexes, config))


def row_bytes(model_config: Any) -> int:
    """Return the size in bytes of one captured row."""
    return int(model_config.get_hidden_size() * model_config.dtype.itemsize)


class SteeringStatLogger(AggregateStatLoggerBase):  # type: ignore[misc]
    """Sets the metrics of all engines of one front end."""

    def __init__(self, vllm_config: Any, engine_indexes: Sequence[int], config: SteeringConfig) -> None:
        model_name = str(vllm_config.model_config.served_model_name)
        start({"model_name": (model_name,), "engine": tuple(str(index) for index in engine_indexes)})
        size = row_bytes(vllm_config.model_config)
        self._engines = {index: _EngineMetrics(model_name, str(index), size) for index in engine_indexes}
        for engine in self._engines.values():
            engine.set_limits(config)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Record one step of one engine."""
        stats = None if scheduler_stats is None else pop_stats(scheduler_stats)
        if stats is not None and engine_idx in self._engines:
            self._engines[engine_idx].record(stats)

    def log_engine_initialized(self) -> None:
        """Log nothing."""


class _EngineMetrics:
    """The collectors of one engine."""

    def __init__(self, model_name: str, engine: str, row_bytes: int) -> None:
        labels = {"model_name": model_name, "engine": engine}
        self._row_bytes = row_bytes
        self._used = [collector("table_used", **labels, table=table) for table in TABLES]
        self._size = [collector("table_size", **labels, table=table) for table in TABLES]
        self._waiting = {reason: collector("requests_waiting", **labels, reason=reason) for reason in WAITING}
        self._seconds = {part: collector("step_seconds", **labels, part=part) for part in STEP_PARTS}
        self._admitted = collector("requests_admitted", **labels)
        self._reserved = collector("capture_booked_bytes", **labels)
        self._limit = collector("capture_limit_bytes", **labels)
        self._staging = collector("staging_bytes", **labels)
        self._counters = [(field, collector(key, **labels)) for field, key in _COUNTERS.items()]
        self._last_staging_bytes = -1

    def set_limits(self, config: SteeringConfig) -> None:
        """Set the gauges of the configured limits, and the usage of an engine without requests."""
        for table, gauge in zip(TABLES, self._size, strict=True):
            gauge.set(getattr(config, f"max_{table}"))
        self._limit.set(config.capture_mib << 20)
        self._set_usage(TableUsage((0, 0, 0, 0), 0, 0, {}))
        self._set_staging(0)

    def record(self, stats: EngineStats) -> None:
        if stats.usage is not None:
            self._set_usage(stats.usage)
        self._set_staging(stats.staging_bytes)
        for field, counter in self._counters:
            if amount := getattr(stats, field):
                counter.inc(amount)
        self._seconds["scheduler"].observe(stats.scheduler_seconds)
        if stats.worker_seconds is not None:
            self._seconds["worker"].observe(stats.worker_seconds)

    def _set_staging(self, num_bytes: int) -> None:
        if num_bytes != self._last_staging_bytes:
            self._last_staging_bytes = num_bytes
            self._staging.set(num_bytes)

    def _set_usage(self, usage: TableUsage) -> None:
        for gauge, used in zip(self._used, usage.tables, strict=True):
            gauge.set(used)
        for reason, gauge in self._waiting.items():
            gauge.set(usage.waiting.get(reason, 0))
        self._admitted.set(usage.admitted)
        self._reserved.set(usage.reserved_rows * self._row_bytes)
