# SPDX-License-Identifier: Apache-2.0
"""Captured rows and worker statistics as attributes of vLLM's model runner outputs.

vLLM pickles a ``ModelRunnerOutput`` with its instance attributes, so attached values reach the scheduler's process
together with the output of their step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from vllm_steer.capture.step_rows import StepRows
from vllm_steer.compat.internals import AsyncModelRunnerOutput
from vllm_steer.engine.device_to_host import PendingRows
from vllm_steer.metrics.engine_stats import WorkerStats

ROWS_ATTRIBUTE = "steering_rows"
_STATS_ATTRIBUTE = "steering_stats"
_FAILED_ATTRIBUTE = "steering_failed"


def attach_rows(output: Any, pending: Sequence[PendingRows]) -> Any:
    """Return ``output`` with a step's captured rows and records attached.

    An asynchronous output waits for the copy of the rows only in ``get_output``.
    """
    if not pending:
        return output

    def rows() -> tuple[StepRows, ...]:
        return tuple(step for each in pending for step in each.wait())

    return _attach(output, ROWS_ATTRIBUTE, rows, wait=pending[0].event is not None)


def attach_stats(output: Any, stats: WorkerStats | None) -> Any:
    """Return ``output`` with a step's worker statistics attached."""
    return output if stats is None else _attach(output, _STATS_ATTRIBUTE, lambda: stats, wait=False)


def attach_failed(output: Any, failed: dict[str, str]) -> Any:
    """Return ``output`` with the errors of requests whose user hooks failed in its step."""
    return _attach(output, _FAILED_ATTRIBUTE, lambda: failed, wait=False) if failed else output


def failed_of(output: Any) -> dict[str, str]:
    """Return the errors of requests whose user hooks failed, by id."""
    failed: dict[str, str] = getattr(output, _FAILED_ATTRIBUTE, {})
    return failed


def rows_of(output: Any) -> tuple[StepRows, ...]:
    """Return the captured rows attached to a model runner output."""
    rows: tuple[StepRows, ...] = getattr(output, ROWS_ATTRIBUTE, ())
    return rows


def stats_of(output: Any) -> WorkerStats | None:
    """Return the worker statistics attached to a model runner output, or None."""
    stats: WorkerStats | None = getattr(output, _STATS_ATTRIBUTE, None)
    return stats


def keep_tokens(output: Any, request_id: str, count: int) -> None:
    """Keep the first ``count`` tokens that a step has sampled for a request.

    Without a token, the log-probabilities of the prompt are dropped as well: vLLM's scheduler accepts them beside a
    token only.
    """
    if output.sampled_token_ids:
        index = output.req_id_to_index[request_id]
        output.sampled_token_ids[index] = output.sampled_token_ids[index][:count]
    if not count:
        output.prompt_logprobs_dict.pop(request_id, None)
        getattr(output, "prompt_token_id_logprobs_dict", {}).pop(request_id, None)


class AsyncOutput(AsyncModelRunnerOutput):  # type: ignore[misc]
    """A synchronous output whose attachment is still being copied, for example on an earlier pipeline stage."""

    def __init__(self, output: Any) -> None:
        self._output = output

    def get_output(self) -> Any:
        return self._output

    def get_kv_connector_output(self) -> Any:
        """Return the output of the connector, which vLLM 0.33 asks for when ``get_output`` has failed."""
        return getattr(self._output, "kv_connector_output", None)


def _attach(output: Any, name: str, value: Callable[[], Any], *, wait: bool) -> Any:
    """Set ``output.name`` to ``value()``, at once or, if ``value`` has to wait, in ``get_output``."""
    if output is None:
        return None
    if not hasattr(output, "get_output"):
        # vLLM returns one shared object for all steps of an earlier pipeline stage.
        output = copy.copy(output)
        if not wait:
            setattr(output, name, value())
            return output
        output = AsyncOutput(output)
    original = output.get_output

    def get_output() -> Any:
        result = original()
        setattr(result, name, value())
        return result

    output.get_output = get_output
    return output
