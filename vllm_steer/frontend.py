# SPDX-License-Identifier: Apache-2.0
"""Between a request and the engine: every request is checked here, in the front end's process, and nowhere later.

What the engine serves is asked of its workers once (they have the model in hand) and kept on the front end's input
processor, which every way in shares: ``LLM``, ``AsyncLLM`` and the API server.
"""

from __future__ import annotations

from typing import Any

from vllm.utils import length_from_prompt_token_ids_or_embeds

from vllm_steer.capabilities import Capabilities
from vllm_steer.config import SteeringConfig, from_vllm_config
from vllm_steer.errors import SteeringError
from vllm_steer.params import program_of

_RPC = "steering_capabilities"
_KEPT = "_steering_capabilities"
NOT_ENABLED = (
    "this engine was started without steering, so it would be ignored; start it with --enable-steering "
    "(LLM(enable_steering=True))"
)


def capabilities_of(llm_engine: Any) -> Capabilities | None:
    """What an ``LLMEngine`` serves; None where steering is not enabled."""
    config = from_vllm_config(llm_engine.vllm_config)
    if config is None:
        return None
    if _kept(llm_engine) is None:
        _keep(llm_engine, llm_engine.collective_rpc(_RPC), config)
    return _kept(llm_engine)


async def ensure_capabilities(engine_client: Any) -> Capabilities | None:
    """What an ``AsyncLLM`` serves; None where steering is not enabled."""
    config = from_vllm_config(engine_client.vllm_config)
    if config is None:
        return None
    if _kept(engine_client) is None:
        _keep(engine_client, await engine_client.collective_rpc(_RPC), config)
    return _kept(engine_client)


def _kept(engine: Any) -> Capabilities | None:
    return getattr(engine.input_processor, _KEPT, None)


def _keep(engine: Any, reports: Any, config: SteeringConfig) -> None:
    setattr(engine.input_processor, _KEPT, Capabilities.merge(reports, config))


def check_params(params: Any, capabilities: Capabilities | None, prompt_len: int | None = None) -> None:
    """Raise :class:`SteeringError` unless these sampling parameters can be served exactly as asked."""
    program = program_of(params)
    if program is None:
        return
    if capabilities is None:
        raise SteeringError("steering", NOT_ENABLED)
    capabilities.check(program, prompt_len)


def check_engine_request(input_processor: Any, request: Any) -> None:
    """The last check before a request leaves the front end; the prompt is tokenised by now."""
    if program_of(request.sampling_params) is None:
        return
    if request.resumable:
        raise SteeringError(
            "steering", "streaming input turns outputs into prompt, which steering does not define yet; send whole prompts"
        )
    prompt_len = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
    check_params(request.sampling_params, getattr(input_processor, _KEPT, None), prompt_len)
