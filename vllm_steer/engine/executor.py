# SPDX-License-Identifier: Apache-2.0
"""Collection of captured rows from all pipeline stages.

vLLM takes the output of a step from the last stage only, unless an output aggregator is set, as KV connectors do. With
an aggregator every worker sends its output, so each stage sends its own rows straight to the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_steer.compat.internals import MultiprocExecutor
from vllm_steer.engine.model_output import ROWS_ATTRIBUTE, rows_of


class RowAggregator:
    """Output aggregator that adds the captured rows of every stage to the output of a step."""

    def __init__(self, upstream: Any = None) -> None:
        self._upstream = upstream

    def aggregate(self, outputs: Sequence[Any], output_rank: int = 0) -> Any:
        """Return the output of ``output_rank``, or ``upstream``'s aggregate, with the rows of all stages."""
        result = outputs[output_rank] if self._upstream is None else self._upstream.aggregate(outputs, output_rank)
        rows = tuple(step for output in outputs for step in rows_of(output))
        if rows and result is not None:
            setattr(result, ROWS_ATTRIBUTE, rows)
        return result


class RowsOfAllStages:
    """Mixin of executors that derive from vLLM's ``MultiprocExecutor``: it adds the rows of every stage."""

    kv_output_aggregator: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_output_aggregator = RowAggregator()

    def init_kv_output_aggregator(self, connector: Any) -> None:
        super().init_kv_output_aggregator(connector)  # type: ignore[misc]
        self.kv_output_aggregator = RowAggregator(self.kv_output_aggregator)


class SteeringExecutor(RowsOfAllStages, MultiprocExecutor):  # type: ignore[misc]
    """vLLM's ``MultiprocExecutor`` with the rows of every stage, set as ``distributed_executor_backend``."""
