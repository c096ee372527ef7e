# SPDX-License-Identifier: Apache-2.0
"""Collect steering statistics in the scheduler and add them to the statistics that vLLM sends to a front end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_steer.capture.row_payload import RECORDS
from vllm_steer.engine.admission import AdmissionController
from vllm_steer.engine.model_output import rows_of, stats_of
from vllm_steer.metrics.engine_stats import EngineStats, TableUsage, attach_stats


class EngineStatsCollector:
    """Counters of one scheduler. If no request is steered or captured, a step only checks the admission state.

    Attributes:
        seconds: Host time spent in the scheduler since the last step.
        timed_out: Requests that timed out since the last report.
        given_up: Requests that run without their captures, since the last report.
    """

    def __init__(self, admission: AdmissionController) -> None:
        self._admission = admission
        self._staging_bytes = 0
        self._reported_version = 0
        self._was_busy = False
        self.seconds = 0.0
        self.timed_out = 0
        self.given_up = 0

    def attach_to(self, outputs: Mapping[int, Any], model_output: Any) -> None:
        """Add the statistics of a finished step to its outputs.

        Nothing is added if vLLM sends no scheduler statistics with this step.

        Args:
            outputs: vLLM's ``EngineCoreOutputs`` by client.
            model_output: vLLM's model runner output of the step.
        """
        seconds, self.seconds = self.seconds, 0.0
        busy = self._admission.is_busy
        if not (busy or self._was_busy or self.timed_out):
            return
        scheduler_stats = next((o.scheduler_stats for o in outputs.values() if o.scheduler_stats is not None), None)
        if scheduler_stats is None:
            return
        self._was_busy = busy
        worker = stats_of(model_output)
        if worker is not None:
            self._staging_bytes = worker.staging_bytes
        sent = rows_of(model_output)
        steps = [step for step in sent if step.index.projection != RECORDS]
        stats = EngineStats(
            usage=self._changed_usage(),
            staging_bytes=self._staging_bytes,
            timed_out=self.timed_out,
            given_up=self.given_up,
            captured_rows=sum(step.rows.shape[0] for step in steps),
            captured_bytes=sum(step.rows.nbytes for step in steps),
            recorded_tokens=sum(step.rows.shape[0] for step in sent if step.index.projection == RECORDS),
            scheduler_seconds=seconds,
            worker_seconds=None if worker is None else worker.seconds,
        )
        self.timed_out = self.given_up = 0
        attach_stats(scheduler_stats, stats)

    def _changed_usage(self) -> TableUsage | None:
        admission = self._admission
        if admission.version == self._reported_version:
            return None
        self._reported_version = admission.version
        return TableUsage(
            admission.allocator.in_use,
            admission.num_admitted,
            admission.reserved_rows,
            admission.waiting_by_reason(),
        )
