# SPDX-License-Identifier: Apache-2.0
"""An engine's numbers on their way to the front end.

vLLM sends its scheduler's statistics with the outputs of a step, to one of the front ends. They have one free-form
field, ``kv_connector_stats``: ours ride in it under a key, beside whatever a KV connector put there, and
:class:`~vllm_steer.metrics.stat_logger.SteeringStatLogger` takes them out before anybody else looks. Where vLLM keeps
no statistics (``disable_log_stats``), none of ours are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_steer.engine.admission import AdmissionController
from vllm_steer.engine.device_to_host import ATTRIBUTE
from vllm_steer.metrics.worker_stats import note_on

STATS_KEY = "__steer_stats__"


class EngineUsage(msgspec.Struct, frozen=True, array_like=True):
    """What is booked."""

    tables: tuple[int, int, int]
    """Rows, instructions and vectors in use."""
    admitted: int
    capture_rows: int
    """Of admitted requests."""
    waiting: dict[str, int]


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """One step that had anything of ours in it."""

    books: EngineUsage | None
    """None where they are as they were."""
    staging_bytes: int
    timed_out: int
    """Since the last report, as what follows."""
    given_up: int
    captured_rows: int
    captured_bytes: int
    scheduler_seconds: float
    worker_seconds: float | None
    """None where it had nothing to do for us."""


class EngineMeter:
    """Collects in the scheduler; :meth:`put_on` hands out what is new. While nobody steers, a step costs a look at the
    books."""

    def __init__(self, admission: AdmissionController) -> None:
        self._admission = admission
        self._staging = 0
        self._told = 0
        self._was_busy = False
        self.seconds = 0.0
        self.given_up = 0
        self.timed_out = 0

    def put_on(self, outputs: Mapping[int, Any], model_output: Any) -> None:
        """At the end of a step: onto the statistics that go out with its outputs, if any do."""
        seconds, self.seconds = self.seconds, 0.0
        busy = self._admission.is_busy
        if not (busy or self._was_busy or self.timed_out):
            return
        stats = next((each.scheduler_stats for each in outputs.values() if each.scheduler_stats is not None), None)
        if stats is None:
            return
        self._was_busy = busy
        worker = note_on(model_output)
        if worker is not None:
            self._staging = worker.staging_bytes
        rows = getattr(model_output, ATTRIBUTE, ())
        news = EngineStats(
            self._books(),
            self._staging,
            self.timed_out,
            self.given_up,
            sum(step.rows.shape[0] for step in rows) if rows else 0,
            sum(step.rows.nbytes for step in rows) if rows else 0,
            seconds,
            None if worker is None else worker.seconds,
        )
        self.timed_out = self.given_up = 0
        connectors = stats.kv_connector_stats
        # A copy: a connector may keep the dict that it gave.
        stats.kv_connector_stats = {**connectors, STATS_KEY: news} if connectors else {STATS_KEY: news}

    def _books(self) -> EngineUsage | None:
        admission = self._admission
        if admission.changes == self._told:
            return None
        self._told = admission.changes
        return EngineUsage(
            admission.ledger.in_use, admission.num_admitted, admission.captures_booked, admission.waiting()
        )


def take_stats(scheduler_stats: Any) -> EngineStats | None:
    """Take our numbers out of vLLM's statistics; what is left is as if they had never been there."""
    given = scheduler_stats.kv_connector_stats
    if not given or STATS_KEY not in given:
        return None
    rest = dict(given)
    news = rest.pop(STATS_KEY)
    scheduler_stats.kv_connector_stats = rest or None
    return news if isinstance(news, EngineStats) else msgspec.convert(news, EngineStats)
