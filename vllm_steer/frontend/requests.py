# SPDX-License-Identifier: Apache-2.0
"""Preparation of a request in the front end: complete its parameters, check it, and strip front-end data."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from vllm_steer.capture.server_wide import with_captures
from vllm_steer.compat.internals import SamplingParams as VllmSamplingParams
from vllm_steer.compat.internals import current_platform, length_from_prompt_token_ids_or_embeds
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import NOT_ENABLED, EngineContext, context_of, ensure_engine_context
from vllm_steer.frontend.live import check_live
from vllm_steer.frontend.part_markers import bind_request
from vllm_steer.frontend.prompt_tokens import check_mask
from vllm_steer.metrics.requests import count_request
from vllm_steer.params import (
    APPLIED_KEY,
    CAPTURE_KEY,
    FILE_KEY,
    MODULES_KEY,
    PROGRAM_KEY,
    capture_specs,
    program_bytes,
    program_of,
    refuse_assigned_fields,
    refuse_unknown_args,
    strip_for_engine,
)
from vllm_steer.registry.errors import UnknownModuleError
from vllm_steer.registry.snapshot import Snapshot
from vllm_steer.request.references import MODULES_FIELD

_beam_steering: ContextVar[Mapping[str, Any] | None] = ContextVar("beam_steering", default=None)
"""``extra_args`` with the global steering that all steps of a running ``LLM.beam_search`` get."""
SAMPLED = (
    "must be 0 with speculative decoding: vLLM's CPU build gives greedy requests wrong tokens if a sampled one is in "
    "their batch"
)
PROMPT_LOGPROBS = (
    "vLLM's CPU build stops at prompt_logprobs if it serves LoRA adapters; omit them or start without LoRA"
)


def complete_params(context: EngineContext | None, params: Any, snapshot: Snapshot | None = None) -> Any:
    """Return ``params`` with everything that the front end adds.

    That is global steering, the modules that the request names, and the server-wide captures. Returns ``params`` itself
    if there is nothing to add, otherwise a copy. Modules are those of ``snapshot``, by default the registry's newest.

    Raises:
        SteeringError: A module does not exist, the combined edits exceed a limit, a key of ``extra_args`` is a misspelt
            field, or a field was assigned to ``params``.
    """
    refuse_assigned_fields(params)
    if context is None or not isinstance(params, VllmSamplingParams):
        return params
    extra = params.extra_args or {}
    if (steps := _beam_steering.get()) is not None:
        extra = {**extra, **steps}
    refuse_unknown_args(extra)
    try:
        completed = context.registry.compose(extra, snapshot)
    except UnknownModuleError as error:
        raise error.with_names((snapshot or context.registry.snapshot()).index.modules) from None
    if completed is not extra or steps is not None:
        params = copy.copy(params)
        params.extra_args = completed
    server_wide = context.capture_manager.server_wide
    return with_captures(params, server_wide) if server_wide else params


async def complete_params_async(engine_client: Any, params: Any) -> Any:
    """Return :func:`complete_params` for an ``AsyncLLM``, without reading files in its event loop."""
    context = await ensure_engine_context(engine_client)
    if context is None or APPLIED_KEY in (getattr(params, "extra_args", None) or {}):
        return complete_params(context, params)  # the server has composed it
    return complete_params(context, params, await context.registry.refresh())


def check_beam_search(context: EngineContext, snapshot: Snapshot, field: str) -> None:
    """Raise :class:`SteeringError` for ``field`` if global steering or server-wide captures would differ for beams.

    vLLM runs each step of a beam as a request for one token, whose prompt ends with the tokens generated so far.
    """
    if context.capture_manager.server_wide:
        raise SteeringError(
            field, "is not supported with server-wide captures, which would capture every step of a beam; use sampling"
        )
    program = snapshot.steering_program
    if program is not None and not all(edit.is_uniform for edit in program.edits):
        raise SteeringError(field, "is not supported while global steering has edits of some tokens only; use sampling")


@contextmanager
def beam_search_steps(context: EngineContext) -> Iterator[None]:
    """Give all steps of an offline beam search, which run within this context, the present global steering.

    Another thread or process may change it during the search, and only the present one has been checked.

    Raises:
        SteeringError: See :func:`check_beam_search`.
    """
    snapshot = context.registry.snapshot()
    check_beam_search(context, snapshot, "beam_search")
    token = _beam_steering.set({APPLIED_KEY: b"", **context.registry.compose({}, snapshot)})
    try:
        yield
    finally:
        _beam_steering.reset(token)


def check_engine_request(input_processor: Any, request: Any) -> None:
    """Raise :class:`SteeringError` unless the engine serves ``request`` exactly as written.

    The last check in the front end: the prompt is tokenised and the parameters are complete.
    """
    params = request.sampling_params
    extra = getattr(params, "extra_args", None) or {}
    if MODULES_KEY in extra:
        raise SteeringError(MODULES_FIELD, NOT_ENABLED)
    if FILE_KEY in extra:
        raise SteeringError(f"extra_args.{FILE_KEY}", "reserved for internal use; leave it out")
    context = context_of(input_processor)
    prompt_len = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
    if context is not None:
        check_parameters(input_processor.vllm_config, params)
    if program_bytes(params) is None:
        if capture_specs(params):
            raise SteeringError(f"extra_args.{CAPTURE_KEY}", "has no compiled program beside it; use `capture` instead")
        return
    if request.resumable:
        refuse_streaming_input(params)
    program = program_of(params)
    if context is None or (program is not None and program.has_names):
        raise SteeringError("steering", NOT_ENABLED)
    check_mask(request)
    if context.markers is not None:
        bind_request(request, input_processor, context.markers)
        params = request.sampling_params
    context.check(params, prompt_len)


def check_parameters(vllm_config: Any, params: Any) -> None:
    """Raise :class:`SteeringError` for sampling parameters that no engine with this configuration serves.

    Called before a streamed response starts as well; None, for pooling, is always served.
    """
    check_cpu_request(vllm_config, params)
    check_live(vllm_config, program_of(params))


def check_cpu_request(config: Any, params: Any) -> None:
    """Raise SteeringError for a request that vLLM's CPU build answers wrongly, or that stops its engine.

    Other devices serve them. Faults that are repaired are in :mod:`vllm_steer.engine.cpu_workarounds`.

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


def refuse_streaming_input(params: Any) -> None:
    """Raise :class:`SteeringError` if the parameters of a streaming-input session use steering or capture.

    vLLM assigns a session's id through an empty request, and its pieces, each of which may have parameters of its own,
    bypass :func:`check_engine_request`.
    """
    extra = getattr(params, "extra_args", None) or {}
    if any(key in extra for key in (PROGRAM_KEY, CAPTURE_KEY, MODULES_KEY, FILE_KEY)):
        raise SteeringError(
            "steering",
            "not supported with streaming input, which turns outputs into prompt; send complete prompts",
        )


def check_resumable(_output_processor: Any, request: Any) -> None:
    """Raise :class:`SteeringError` if ``request`` is a piece of a streaming-input session and uses steering."""
    if request.resumable:
        refuse_streaming_input(request.sampling_params)


def count_sample(output_processor: Any, request: Any) -> None:
    """Count one sample in the metrics of its engine."""
    context = context_of(output_processor)
    if context is not None:
        count_request(context.model_name, request.sampling_params)


def strip_request(output_processor: Any, request: Any) -> None:
    """Remove what only the front end reads, and replace a large program by a reference to its file."""
    context = context_of(output_processor)
    strip_for_engine(request, None if context is None else context.program_files)
