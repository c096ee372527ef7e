# SPDX-License-Identifier: Apache-2.0
"""Requests that vLLM's CPU build answers wrongly, or that stop its engine, with or without steering.

They are refused in engines with steering. Other devices serve them. Faults that are repaired are in
:mod:`vllm_steer.engine.cpu_workarounds`.
"""

from __future__ import annotations

from typing import Any

from vllm_steer.compat.internals import current_platform
from vllm_steer.errors import SteeringError

SAMPLED = (
    "must be 0 with speculative decoding: vLLM's CPU build gives greedy requests wrong tokens if a sampled one is in "
    "their batch"
)
PROMPT_LOGPROBS = (
    "vLLM's CPU build stops at prompt_logprobs if it serves LoRA adapters; omit them or start without LoRA"
)


def check_cpu_request(config: Any, params: Any) -> None:
    """Raise SteeringError for a request that vLLM's CPU build cannot serve.

    Args:
        config: vLLM's configuration of the engine.
        params: Sampling parameters of the request; None for pooling.
    """
    if params is None or not current_platform.is_cpu():
        return
    if config.speculative_config is not None and params.temperature > 0:
        raise SteeringError("temperature", SAMPLED)
    if config.lora_config is not None and params.prompt_logprobs is not None:
        raise SteeringError("prompt_logprobs", PROMPT_LOGPROBS)
