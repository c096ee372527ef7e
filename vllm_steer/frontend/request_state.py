# SPDX-License-Identifier: Apache-2.0
"""A sample in the front end of which more is said on its outputs than vLLM has fields for."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.output_processor import RequestState

from vllm_steer.frontend.applied import state_applied
from vllm_steer.frontend.outputs import finish, new_rows, refusal
from vllm_steer.server.http.request_context import record_results
from vllm_steer.server.http.request_fields import NoRoomError


class SteeredSample(RequestState):  # type: ignore[misc]
    """What vLLM's state of a sample becomes where the sample is steered or read; others stay vLLM's own."""

    def make_request_output(
        self, new_token_ids: Any, pooling_output: Any, finish_reason: Any, stop_reason: Any, *rest: Any, **more: Any
    ) -> Any:
        """vLLM's, with what was applied to the request, or with why it was ended."""
        if self.queue is not None and (reason := refusal(finish_reason, stop_reason)) is not None:
            # AsyncLLM raises what it finds in a request's queue; ``LLM`` returns an output that ended with an error.
            self.queue.put(NoRoomError(reason))
            return None
        output = super().make_request_output(new_token_ids, pooling_output, finish_reason, stop_reason, *rest, **more)
        return state_applied(self, output)

    def _new_completion_output(self, token_ids: Any, finish_reason: Any, stop_reason: Any, *rest: Any) -> Any:
        output = super()._new_completion_output(token_ids, finish_reason, stop_reason, *rest)
        output.capture_rows = new_rows(self)
        if finish_reason is not None:
            output.capture_results = finish(self, finish_reason, stop_reason)
            record_results(self, output.capture_results)
        return output
