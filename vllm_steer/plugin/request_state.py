# SPDX-License-Identifier: Apache-2.0
"""vLLM's front-end state of a sample, extended for samples that are steered or captured."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any
from weakref import WeakValueDictionary

from vllm_steer.compat.internals import GracefulHTTPError, RequestState
from vllm_steer.frontend.outputs import (
    adds_to_outputs,
    applied_steering,
    finish_capture,
    new_readouts,
    new_rows,
    num_forwarded,
    record_stop,
    refusal,
)
from vllm_steer.frontend.reach import record_reach
from vllm_steer.params import program_bytes


class CapacityError(GracefulHTTPError):  # type: ignore[misc]
    """The scheduler ended a request that found no room in the engine. The request can be repeated.

    ``AsyncLLM.generate`` raises it, and a server responds with HTTP 503. ``LLM.generate`` returns an output with
    ``finish_reason="error"`` and the reason in ``stop_reason`` instead.

    Examples:
        >>> from vllm_steer import CapacityError
        >>> async def generate(llm, prompt, params):
        ...     try:
        ...         return [output async for output in llm.generate(prompt, params, "request-1")]
        ...     except CapacityError as error:
        ...         print(error)
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"steering: {reason}", HTTPStatus.SERVICE_UNAVAILABLE)


_REFUSED_PARENTS = "_steering_refused_parents"
"""Attribute of an output processor and of the states of its samples that share a request: the ids of vLLM's
``ParentRequest`` of samples that were refused since the last call of :func:`abort_siblings`."""

_make_request_output = RequestState.make_request_output
_new_completion_output = RequestState._new_completion_output


class SteeredRequestState(RequestState):  # type: ignore[misc]
    """vLLM's ``RequestState`` with captured rows, applied steering and the scheduler's refusals on its outputs."""

    def make_request_output(
        self, new_token_ids: Any, pooling_output: Any, finish_reason: Any, stop_reason: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if finish_reason is None:  # hot path: called for every request in every step
            output = _make_request_output(self, new_token_ids, pooling_output, None, stop_reason, *args, **kwargs)
            if output is not None:
                output.steering_applied = applied_steering(self, finished=False)
            return output
        if self.queue is not None and (reason := refusal(finish_reason, stop_reason)) is not None:
            # AsyncLLM raises an exception that it finds in a request's queue. LLM has no queue and returns an output.
            self.queue.put(CapacityError(reason))
            if self.parent_req is not None:
                getattr(self, _REFUSED_PARENTS).append(self.parent_req.request_id)
            return None
        output = _make_request_output(self, new_token_ids, pooling_output, finish_reason, stop_reason, *args, **kwargs)
        if output is not None:
            output.steering_applied = applied_steering(self, output.finished)
        return output

    def _new_completion_output(self, token_ids: Any, finish_reason: Any, stop_reason: Any, *args: Any) -> Any:
        output = _new_completion_output(self, token_ids, finish_reason, stop_reason, *args)
        if finish_reason is not None:
            record_stop(self, stop_reason)
        if adds_to_outputs(self):
            output.capture_rows = new_rows(self)
            output.readouts, output.steering_trace = new_readouts(self, finished=finish_reason is not None)
        if finish_reason is not None:
            record_reach(self, num_forwarded(self))
            output.capture_results = finish_capture(self, finish_reason, stop_reason)
        return output


def extend_state(output_processor: Any, request: Any) -> None:
    """Make the state of a sample a :class:`SteeredRequestState` if the sample has a program."""
    if program_bytes(request.sampling_params) is not None:
        state = output_processor.request_states[request.request_id]
        state.__class__ = SteeredRequestState
        if state.parent_req is not None:
            parents = output_processor.parent_requests
            if not isinstance(parents, WeakValueDictionary):
                # vLLM keeps the parent of samples that are aborted by the client's id, and with it the captured rows of
                # its ended samples. The states of running samples refer to their parent.
                output_processor.parent_requests = WeakValueDictionary(parents)
            setattr(state, _REFUSED_PARENTS, vars(output_processor).setdefault(_REFUSED_PARENTS, []))


def abort_siblings(output_processor: Any, processed: Any) -> None:
    """Abort the other samples of requests of which a sample was refused while outputs were processed.

    The client gets the error, and ``AsyncLLM.generate`` does not abort a request whose error it raises.
    """
    parents: list[str] | None = getattr(output_processor, _REFUSED_PARENTS, None)
    if parents:
        processed.reqs_to_abort += output_processor.abort_requests(dict.fromkeys(parents), internal=True)
        parents.clear()
