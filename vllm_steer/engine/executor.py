# SPDX-License-Identifier: Apache-2.0
"""Captured rows of all pipeline stages: each stage answers a step with its own rows, and they are put together here.

vLLM takes a step's output from the last stage alone, unless an output aggregator is set, as KV connectors do; then
every worker answers. Rows go that way from their stage to the scheduler: nothing passes through later stages, and
nobody has to ask for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from vllm_steer.engine.model_output import ROWS_ATTRIBUTE, rows_of


class RowAggregator:
    """What vLLM asks to make one output of all workers' outputs of a step."""

    def __init__(self, upstream: Any = None) -> None:
        self._upstream = upstream

    def aggregate(self, outputs: Sequence[Any], output_rank: int = 0) -> Any:
        """The output of ``output_rank``, or what ``upstream`` makes of all, with the rows of every stage."""
        result = outputs[output_rank] if self._upstream is None else self._upstream.aggregate(outputs, output_rank)
        rows = tuple(step for output in outputs for step in rows_of(output))
        if rows and result is not None:
            setattr(result, ROWS_ATTRIBUTE, rows)
        return result


class SteeringExecutor(MultiprocExecutor):  # type: ignore[misc]
    """vLLM's executor of local worker processes, with every stage's rows. Named by ``distributed_executor_backend``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_output_aggregator = RowAggregator()

    def init_kv_output_aggregator(self, connector: Any) -> None:
        super().init_kv_output_aggregator(connector)
        self.kv_output_aggregator = RowAggregator(self.kv_output_aggregator)
