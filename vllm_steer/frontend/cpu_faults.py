# SPDX-License-Identifier: Apache-2.0
"""Requests that vLLM's CPU build answers wrongly, or that stop its engine, with or without steering.

They are refused in engines with steering. Other devices serve them.
"""

from __future__ import annotations

from typing import Any

from vllm_steer.compat.internals import current_platform
from vllm_steer.errors import SteeringError

SAMPLED = (
    "must be 0 with speculative decoding: vLLM's CPU build gives greedy requests wrong tokens if a sampled one is in "
    "their batch"
)
SEED = (
    "vLLM's CPU build stops if the prompt of a seeded request takes several steps: the prompt has {length} tokens and "
    "a step {step}; omit the seed or raise --max-num-batched-tokens"
)
PROMPT_LOGPROBS = (
    "vLLM's CPU build stops at prompt_logprobs if it serves LoRA adapters; omit them or start without LoRA"
)
SLOTS = (
    "vLLM's CPU build adds the adapter in the last slot to requests without one, so this engine serves {most} "
    "adapters; start it with --max-loras {needed} or more"
)
_ADAPTERS = "_steering_adapters"


def check_cpu_request(input_processor: Any, request: Any, prompt_len: int) -> None:
    """Raise SteeringError for a request that vLLM's CPU build cannot serve.

    Args:
        input_processor: vLLM's ``InputProcessor`` of the engine client.
        request: The engine's request.
        prompt_len: Length of its prompt in tokens.
    """
    if not current_platform.is_cpu():
        return
    config, params = input_processor.vllm_config, request.sampling_params
    if params is not None and config.speculative_config is not None and params.temperature > 0:
        raise SteeringError("temperature", SAMPLED)
    step = config.scheduler_config.max_num_batched_tokens
    if params is not None and params.seed is not None and params.temperature > 0 and prompt_len > step:
        raise SteeringError("seed", SEED.format(length=prompt_len, step=step))
    if config.lora_config is None:
        return
    if params is not None and params.prompt_logprobs is not None:
        raise SteeringError("prompt_logprobs", PROMPT_LOGPROBS)
    if request.lora_request is not None:
        _check_slots(input_processor, request.lora_request.lora_int_id, config.lora_config.max_loras)


def _check_slots(input_processor: Any, adapter: int, slots: int) -> None:
    """Raise SteeringError for an adapter that would get the last slot. Slots are filled in order and stay filled."""
    used: set[int] = vars(input_processor).setdefault(_ADAPTERS, set())
    if adapter not in used and len(used) + 1 >= slots:
        raise SteeringError("lora_request", SLOTS.format(most=slots - 1, needed=len(used) + 2))
    used.add(adapter)
