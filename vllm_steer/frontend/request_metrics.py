# SPDX-License-Identifier: Apache-2.0
"""Metrics of the samples that the front end gives to the engine."""

from __future__ import annotations

from typing import Any

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import context_of
from vllm_steer.metrics.requests import count_request
from vllm_steer.params import program_bytes
from vllm_steer.program import Program


def count_sample(output_processor: Any, request: Any) -> None:
    """Count a sample that was added to vLLM's output processor."""
    context = context_of(output_processor)
    if context is None:
        return
    data = program_bytes(request.sampling_params)
    try:
        program = None if data is None else Program.from_checked(data)
    except SteeringError:
        # Malformed programs that bypass the front end's checks are refused by the engine.
        return
    count_request(context.model_name, program)
