# SPDX-License-Identifier: Apache-2.0
"""Between a request and the engine: every request is checked here, in the front end's process, and nowhere later.

What the engine serves is asked of its workers once (they have the model in hand) and kept on the front end's input
processor, which every way in shares: ``LLM``, ``AsyncLLM`` and the API server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.utils import length_from_prompt_token_ids_or_embeds

from vllm_steer.capabilities import Capabilities
from vllm_steer.capture.desk import CaptureDesk
from vllm_steer.capture.server_wide import with_captures
from vllm_steer.config import SteeringConfig, from_vllm_config
from vllm_steer.errors import SteeringError
from vllm_steer.params import capture_specs, program_of

_RPC = "steering_capabilities"
_KEPT = "_steering_served"
_OPTIONS = "_steering_consumer_options"
CONSUMERS_VARIABLE = "VLLM_STEER_CAPTURE_CONSUMERS"
NOT_ENABLED = (
    "this engine was started without steering, so it would be ignored; start it with --enable-steering "
    "(LLM(enable_steering=True))"
)
NO_CAPTURE_UNDER_PP = "pipeline parallelism: rows of earlier stages have no way out yet; use tensor parallelism"


@dataclass(frozen=True)
class Served:
    """What one engine client checks requests against, and hands captures to."""

    capabilities: Capabilities
    desk: CaptureDesk

    def check(self, params: Any, prompt_len: int | None) -> None:
        """Raise :class:`SteeringError` unless this engine serves these parameters exactly as asked."""
        program = program_of(params)
        if program is not None:
            self.capabilities.check(program, prompt_len, None if prompt_len is None else params.max_tokens)
        self.desk.check(capture_specs(params))


def served_by(llm_engine: Any) -> Served | None:
    """What an ``LLMEngine`` serves; None where steering is not enabled."""
    config = from_vllm_config(llm_engine.vllm_config)
    if config is None:
        return None
    return _kept(llm_engine) or _keep(llm_engine, llm_engine.collective_rpc(_RPC), config)


async def ensure_served(engine_client: Any) -> Served | None:
    """What an ``AsyncLLM`` serves; None where steering is not enabled."""
    config = from_vllm_config(engine_client.vllm_config)
    if config is None:
        return None
    return _kept(engine_client) or _keep(engine_client, await engine_client.collective_rpc(_RPC), config)


def set_consumers(engine: Any, options: Mapping[str, Mapping[str, Any]]) -> None:
    """Which consumers an engine client has beside ``memory``; to be called before it serves its first request."""
    setattr(engine, _OPTIONS, options)


def _kept(engine: Any) -> Served | None:
    return getattr(engine.input_processor, _KEPT, None)


def _keep(engine: Any, reports: Any, config: SteeringConfig) -> Served:
    kept = _kept(engine)
    if kept is not None:
        # Two first requests waited for the same answer.
        return kept
    parallel = engine.vllm_config.parallel_config
    no_capture = NO_CAPTURE_UNDER_PP if parallel.pipeline_parallel_size > 1 else None
    capabilities = Capabilities.merge(reports, config, no_capture)
    options = getattr(engine, _OPTIONS, None)
    if options is None:
        # Set by the server's flag; API server processes inherit it.
        options = json.loads(os.environ.get(CONSUMERS_VARIABLE, "{}"))
    served_name = engine.vllm_config.model_config.served_model_name
    model = served_name if isinstance(served_name, str) else str(engine.vllm_config.model_config.model)
    served = Served(capabilities, CaptureDesk(capabilities, model, options))
    setattr(engine.input_processor, _KEPT, served)
    setattr(engine.output_processor, _KEPT, served)
    return served


def desk_of(output_processor: Any) -> CaptureDesk:
    """The desk of the engine client that this output processor belongs to."""
    served: Served = getattr(output_processor, _KEPT)
    return served.desk


def with_server_wide(served: Served | None, params: Any) -> Any:
    """A request's parameters with the captures that this engine client makes of every request."""
    if served is None or not served.desk.server_wide or not isinstance(params, VllmSamplingParams):
        return params
    return with_captures(params, served.desk.server_wide)


def check_params(params: Any, served: Served | None, prompt_len: int | None = None) -> None:
    """Raise :class:`SteeringError` unless these sampling parameters can be served exactly as asked."""
    if program_of(params) is None:
        return
    if served is None:
        raise SteeringError("steering", NOT_ENABLED)
    served.check(params, prompt_len)


def check_engine_request(input_processor: Any, request: Any) -> None:
    """The last check before a request leaves the front end; the prompt is tokenised by now."""
    if program_of(request.sampling_params) is None:
        if capture_specs(request.sampling_params):
            raise SteeringError("extra_args.steer_capture", "comes without its program; use capture instead")
        return
    if request.resumable:
        raise SteeringError(
            "steering",
            "streaming input turns outputs into prompt, which steering does not define yet; send whole prompts",
        )
    prompt_len = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
    check_params(request.sampling_params, getattr(input_processor, _KEPT, None), prompt_len)
