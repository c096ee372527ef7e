# SPDX-License-Identifier: Apache-2.0
"""vLLM's way of showing statistics, for ours: one more of the loggers that it gives each step's numbers to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_steer.config import SteeringConfig, from_vllm_config
from vllm_steer.metrics.collectors import child, start
from vllm_steer.metrics.engine_stats import EngineStats, EngineUsage, take_stats
from vllm_steer.metrics.table import STEP_PARTS, TABLES, WAITING


def join_stat_loggers(manager: Any, vllm_config: Any) -> None:
    """Put ours in front of vLLM's loggers, where steering is enabled: it takes out what they would not understand."""
    config = from_vllm_config(vllm_config)
    if config is not None:
        manager.stat_loggers.insert(0, SteeringStatLogger(vllm_config, manager.engine_indexes, config))


def row_bytes(model_config: Any) -> int:
    """Bytes of a captured row."""
    return int(model_config.get_hidden_size() * model_config.dtype.itemsize)


class SteeringStatLogger(AggregateStatLoggerBase):  # type: ignore[misc]
    """The numbers of all engines of one front end."""

    def __init__(self, vllm_config: Any, engine_indexes: Sequence[int], config: SteeringConfig) -> None:
        model_name = str(vllm_config.model_config.served_model_name)
        start({"model_name": (model_name,), "engine": tuple(str(index) for index in engine_indexes)})
        size = row_bytes(vllm_config.model_config)
        self._engines = {index: _Engine(model_name, str(index), size) for index in engine_indexes}
        for engine in self._engines.values():
            engine.show_limits(config)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """One step of one engine."""
        news = None if scheduler_stats is None else take_stats(scheduler_stats)
        if news is not None and engine_idx in self._engines:
            self._engines[engine_idx].show(news)

    def log_engine_initialized(self) -> None:
        """Nothing is logged."""


class _Engine:
    """The collectors of one engine, looked up once."""

    def __init__(self, model_name: str, engine: str, row_bytes: int) -> None:
        labels = {"model_name": model_name, "engine": engine}
        self._row_bytes = row_bytes
        self._used = [child("table_used", **labels, table=table) for table in TABLES]
        self._size = [child("table_size", **labels, table=table) for table in TABLES]
        self._waiting = {reason: child("requests_waiting", **labels, reason=reason) for reason in WAITING}
        self._seconds = {part: child("step_seconds", **labels, part=part) for part in STEP_PARTS}
        self._admitted = child("requests_admitted", **labels)
        self._booked = child("capture_booked_bytes", **labels)
        self._limit = child("capture_limit_bytes", **labels)
        self._staging = child("staging_bytes", **labels)
        self._counters = [(field, child(short, **labels)) for field, short in _COUNTERS.items()]
        self._staging_before = -1

    def show_limits(self, config: SteeringConfig) -> None:
        for table, gauge in zip(TABLES, self._size, strict=True):
            gauge.set(getattr(config, f"max_{table}"))
        self._limit.set(config.capture_mib << 20)
        self.show(EngineStats(EngineUsage((0, 0, 0), 0, 0, {}), 0, 0, 0, 0, 0, 0.0, None), timed=False)

    def show(self, news: EngineStats, *, timed: bool = True) -> None:
        if news.books is not None:
            self._show_books(news.books)
        if news.staging_bytes != self._staging_before:
            self._staging_before = news.staging_bytes
            self._staging.set(news.staging_bytes)
        for field, counter in self._counters:
            if amount := getattr(news, field):
                counter.inc(amount)
        if timed:
            self._seconds["scheduler"].observe(news.scheduler_seconds)
        if news.worker_seconds is not None:
            self._seconds["worker"].observe(news.worker_seconds)

    def _show_books(self, books: EngineUsage) -> None:
        for gauge, used in zip(self._used, books.tables, strict=True):
            gauge.set(used)
        for reason, gauge in self._waiting.items():
            gauge.set(books.waiting.get(reason, 0))
        self._admitted.set(books.admitted)
        self._booked.set(books.capture_rows * self._row_bytes)


_COUNTERS = {
    "timed_out": "requests_timed_out",
    "given_up": "captures_given_up",
    "captured_rows": "captured_rows",
    "captured_bytes": "captured_bytes",
}
"""The fields of :class:`EngineStats` that are counted, and as which metrics."""
