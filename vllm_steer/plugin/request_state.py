# SPDX-License-Identifier: Apache-2.0
"""vLLM's front-end state of a sample, extended for samples that are steered or captured."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any
from weakref import WeakValueDictionary

from vllm_steer.compat.internals import GracefulHTTPError, RequestState
from vllm_steer.frontend.sample_state import SAMPLE, SampleState, attach_sample, refusal


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
"""Attribute of an output processor: the ids of vLLM's ``ParentRequest`` of samples that were refused since the last
call of :func:`abort_siblings`."""

_make_request_output = RequestState.make_request_output
_new_completion_output = RequestState._new_completion_output


class SteeredRequestState(RequestState):  # type: ignore[misc]
    """vLLM's ``RequestState`` with captured rows, applied steering and the scheduler's refusals on its outputs."""

    def make_request_output(
        self, new_token_ids: Any, pooling_output: Any, finish_reason: Any, stop_reason: Any, *args: Any, **kwargs: Any
    ) -> Any:
        sample: SampleState = getattr(self, SAMPLE)
        if finish_reason is None:  # hot path: called for every request in every step
            output = _make_request_output(self, new_token_ids, pooling_output, None, stop_reason, *args, **kwargs)
            if output is not None and sample.listener is None:
                output.steering_applied = sample.applied
            elif sample.listener is not None and not sample.adds_to_outputs:
                self.__class__ = _QuietRequestState
            return output
        if self.queue is not None and (reason := refusal(finish_reason, stop_reason)) is not None:
            # AsyncLLM raises an exception that it finds in a request's queue. LLM has no queue and returns an output.
            self.queue.put(CapacityError(reason))
            if self.parent_req is not None and sample.refused_parents is not None:
                sample.refused_parents.append(self.parent_req.request_id)
            return None
        output = _make_request_output(self, new_token_ids, pooling_output, finish_reason, stop_reason, *args, **kwargs)
        if output is not None and sample.listener is None:
            output.steering_applied = sample.applied_when(output.finished)
        return output

    def _new_completion_output(self, token_ids: Any, finish_reason: Any, stop_reason: Any, *args: Any) -> Any:
        output = _new_completion_output(self, token_ids, finish_reason, stop_reason, *args)
        sample: SampleState = getattr(self, SAMPLE)
        ended = finish_reason is not None
        if ended:
            sample.record_stop(self, stop_reason)
        if sample.adds_to_outputs:
            output.capture_rows = sample.new_rows(self)
            output.readouts, output.steering_trace = sample.new_readouts(self, finished=ended)
        if ended:
            sample.record_reach(self)
            output.capture_results = sample.finish_capture(self, finish_reason, stop_reason)
        return output


class _QuietRequestState(SteeredRequestState):
    """State of a sample whose HTTP response adds everything: until the last one, its outputs are vLLM's own."""

    _new_completion_output = _new_completion_output

    def make_request_output(
        self, new_token_ids: Any, pooling_output: Any, finish_reason: Any, stop_reason: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if finish_reason is not None:
            self.__class__ = SteeredRequestState
            return self.make_request_output(new_token_ids, pooling_output, finish_reason, stop_reason, *args, **kwargs)
        return _make_request_output(self, new_token_ids, pooling_output, None, stop_reason, *args, **kwargs)


def begin_sample(output_processor: Any, request: Any) -> None:
    """Make the state of a sample that has a program a :class:`SteeredRequestState` with a `SampleState`."""
    sample = attach_sample(output_processor, request)
    if sample is None:
        return
    state = output_processor.request_states[request.request_id]
    state.__class__ = SteeredRequestState
    if state.parent_req is not None:
        parents = output_processor.parent_requests
        if not isinstance(parents, WeakValueDictionary):
            # vLLM keeps the parent of samples that are aborted by the client's id, and with it the captured rows of
            # its ended samples. The states of running samples refer to their parent.
            output_processor.parent_requests = WeakValueDictionary(parents)
        sample.refused_parents = vars(output_processor).setdefault(_REFUSED_PARENTS, [])


def abort_siblings(output_processor: Any, processed: Any) -> None:
    """Abort the other samples of requests of which a sample was refused while outputs were processed.

    The client gets the error, and ``AsyncLLM.generate`` does not abort a request whose error it raises.
    """
    parents: list[str] | None = getattr(output_processor, _REFUSED_PARENTS, None)
    if parents:
        processed.reqs_to_abort += output_processor.abort_requests(dict.fromkeys(parents), internal=True)
        parents.clear()
