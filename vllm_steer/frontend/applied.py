# SPDX-License-Identifier: Apache-2.0
"""On vLLM's output path: what was applied to a request is said on each of its outputs. Called from ``plugin.py``."""

from __future__ import annotations

from typing import Any

from vllm_steer.params import APPLIED_KEY
from vllm_steer.registry.schema import SteeringApplied

_APPLIED = "_steering_applied"


def note_applied(output_processor: Any, request: Any) -> None:
    """A sample has been added to the output processor."""
    data = (getattr(request.sampling_params, "extra_args", None) or {}).get(APPLIED_KEY)
    if data:
        state = output_processor.request_states[request.request_id]
        setattr(state, _APPLIED, SteeringApplied.model_validate_json(data))


def state_applied(state: Any, output: Any) -> Any:
    """``output`` of that sample, with what was applied to its request."""
    applied = getattr(state, _APPLIED, None)
    if applied is not None and output is not None:
        output.steering_applied = applied
    return output
