# SPDX-License-Identifier: Apache-2.0
"""Functions that run around methods of vLLM's front end, and the attributes added to its outputs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm_steer.capture.readouts import merge_readouts
from vllm_steer.capture.row_assembler import merge_deltas
from vllm_steer.capture.row_payload import ROWS_REQUEST_ID
from vllm_steer.compat.internals import CompletionOutput, EngineCoreRequest, RequestOutput
from vllm_steer.frontend.context import engine_context
from vllm_steer.frontend.messages import messages_of
from vllm_steer.frontend.outputs import consumers_paused, feed_controllers, take_rows
from vllm_steer.frontend.requests import complete_params, complete_params_async, refuse_streaming_input
from vllm_steer.metrics.stat_logger import install_stat_logger
from vllm_steer.plugin.request_state import abort_siblings


def _params_of(prompt: Any, params: Any) -> Any:
    """Return the parameters that vLLM will use: an engine request made by the caller has its own."""
    return prompt.sampling_params if isinstance(prompt, EngineCoreRequest) else params


def add_request(
    original: Callable[..., Any], engine: Any, request_id: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run ``LLMEngine.add_request`` with completed parameters."""
    params = complete_params(engine_context(engine), _params_of(prompt, params))
    if isinstance(prompt, EngineCoreRequest):
        prompt.sampling_params = params
    with messages_of(prompt):
        return original(engine, request_id, prompt, params, *args, **kwargs)


async def add_request_async(
    original: Callable[..., Any], engine: Any, request_id: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run ``AsyncLLM.add_request`` with completed parameters."""
    params = await complete_params_async(engine, _params_of(prompt, params))
    if isinstance(prompt, AsyncGenerator):
        refuse_streaming_input(params)
    if isinstance(prompt, EngineCoreRequest):
        prompt.sampling_params = params
    with messages_of(prompt):
        return await original(engine, request_id, prompt, params, *args, **kwargs)


def process_outputs(
    original: Callable[..., Any], output_processor: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run ``OutputProcessor.process_outputs`` without the outputs that carry captured rows."""
    if engine_core_outputs and engine_core_outputs[0].request_id == ROWS_REQUEST_ID:
        engine_core_outputs = take_rows(output_processor, engine_core_outputs)
    with consumers_paused(output_processor):
        processed = original(output_processor, engine_core_outputs, *args, **kwargs)
    abort_siblings(output_processor, processed)
    feed_controllers(output_processor)
    return processed


def merge_outputs(original: Callable[..., Any], output: Any, next_output: Any, *args: Any, **kwargs: Any) -> None:
    """Run ``RequestOutput.add``, which merges outputs that a slow client has not read, and merge captures likewise."""
    earlier = {sample.index: sample.capture_rows for sample in output.outputs}
    new = {sample.index: sample.capture_rows for sample in next_output.outputs}
    readouts = {sample.index: sample.readouts for sample in output.outputs}
    new_readouts = {sample.index: (sample.readouts, sample.steering_trace) for sample in next_output.outputs}
    original(output, next_output, *args, **kwargs)
    output.steering_applied = next_output.steering_applied
    finished = {s.index: s.capture_results for s in next_output.outputs if s.capture_results is not None}
    for sample in output.outputs:
        sample.capture_results = finished.get(sample.index, sample.capture_results)
        sample.capture_rows = merge_deltas(earlier.get(sample.index), new.get(sample.index))
        values, trace = new_readouts.get(sample.index, (None, None))
        sample.readouts = merge_readouts(readouts.get(sample.index), values)
        sample.steering_trace = trace or sample.steering_trace


def init_stat_logger_manager(
    original: Callable[..., None], manager: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    """Run ``StatLoggerManager.__init__`` and add this package's logger."""
    original(manager, vllm_config, *args, **kwargs)
    install_stat_logger(manager, vllm_config)


def extend_outputs() -> None:
    """Give vLLM's output classes the attributes of steering and capture, with None for requests without them."""
    CompletionOutput.capture_results = CompletionOutput.capture_rows = None
    CompletionOutput.readouts = CompletionOutput.steering_trace = None
    RequestOutput.capture_results = property(lambda self: self.outputs[0].capture_results if self.outputs else None)
    RequestOutput.steering_applied = None
