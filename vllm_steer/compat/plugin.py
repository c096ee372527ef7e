# SPDX-License-Identifier: Apache-2.0
"""vLLM's entry point, and every method of vLLM that this package wraps.

:func:`register` runs in each of vLLM's processes, as all general plugins do (``plugins/__init__.py``). It touches only
``EngineArgs``, which front ends use and engines do not; the rest is wrapped when a front end makes an engine's
configuration. Nothing that an engine or worker process runs is ever wrapped.

====================================================  =================================================================
wrapped                                               why no official seam will do
====================================================  =================================================================
``EngineArgs.add_cli_args``, ``from_cli_args``        plug-ins cannot add flags to ``vllm serve``
``EngineArgs.create_engine_config``                   settings are checked, and stages' executor and the compiler's
                                                      pass chosen, before loading
``InputProcessor.assign_request_id``                  the one step that every way in takes last; the request is whole
``LLMEngine.add_request``, ``AsyncLLM.add_request``   global steering and modules become part of the request on its way
                                                      in, and what the engine serves must be known before that check
``OutputProcessor.add_request``                       a sample that captures collects its rows from its first output on;
                                                      the last step that each sample takes ahead of the engine, where
                                                      its key's cache salt is put on it and the front end's keys are
                                                      taken off; pieces of a session come this way alone. Its state
                                                      becomes one of ours where it is steered or read
                                                      (``frontend/request_state.py``): outputs have no field for what
                                                      was applied and captured, nor for why a request was ended
``OutputProcessor.process_outputs``                   captured rows come on outputs of their own, ahead of the requests'
``RequestOutput.add``                                 outputs merged in a stream would lose them
``to_sampling_params``, ``to_beam_search_params``     the OpenAI request classes drop fields that they do not know
``StatLoggerManager.__init__``                        vLLM's group of plug-ins for this reaches ``AsyncLLM`` alone, and
                                                      turns statistics on wherever a package is installed
``BaseServing._extract_prompt_len``                   a stream has started by the time the engine checks the prompt
``run_batch.run_batch``, ``run_batch.run_request``    lines of a file come past every middleware
====================================================  =================================================================
"""

from __future__ import annotations

import functools
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm_steer.compat.version import check_settings, check_version, is_tested

_MARK = "_vllm_steer_wraps"


def _wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace ``owner.name`` by ``make(original)``, once; static and class methods stay what they are."""
    raw = owner.__dict__[name]
    kind = type(raw) if isinstance(raw, (staticmethod, classmethod)) else None
    original = raw.__func__ if kind else raw
    if hasattr(original, _MARK):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _MARK, original)
    setattr(owner, name, kind(wrapper) if kind else wrapper)


def register() -> None:
    """vLLM's ``vllm.general_plugins`` entry point."""
    from vllm.engine.arg_utils import EngineArgs

    _wrap(EngineArgs, "add_cli_args", _add_cli_args)
    _wrap(EngineArgs, "from_cli_args", _from_cli_args)
    _wrap(EngineArgs, "create_engine_config", _create_engine_config)


def _add_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_cli_args(parser: Any) -> Any:
        from vllm_steer.server.flags import add_flags

        parser = original(parser)
        add_flags(parser)
        return parser

    return add_cli_args


def _from_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_cli_args(cls: type, args: Any) -> Any:
        from vllm_steer.server.flags import apply_flags

        apply_flags(args)
        return original(cls, args)

    return from_cli_args


def _create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        import vllm

        from vllm_steer.config import choose_executor, from_vllm_config

        enabled = from_vllm_config(self) is not None
        if enabled:
            check_version()
            from vllm_steer.taps.fusion_pass import set_pass

        vllm_config = original(self, *args, **kwargs)
        if enabled:
            check_settings(vllm_config)
            choose_executor(vllm_config)
            set_pass(vllm_config)
        if enabled or is_tested(vllm.__version__):
            wrap_front_end()
        return vllm_config

    return create_engine_config


def wrap_front_end() -> None:
    """Wrap what turns requests into engine requests; only ever called where an engine's configuration is made."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.serve.engine.serving import BaseServing
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.loggers import StatLoggerManager

    _wrap_assign_request_id(InputProcessor)
    _wrap(BaseServing, "_extract_prompt_len", _extract_prompt_len)
    _wrap(LLMEngine, "add_request", _add_request)
    _wrap(AsyncLLM, "add_request", _add_request_async)
    _wrap(OutputProcessor, "add_request", _output_processor_add_request)
    _wrap(OutputProcessor, "process_outputs", _process_outputs)
    _wrap(RequestOutput, "add", _request_output_add)
    _wrap(StatLoggerManager, "__init__", _stat_logger_manager_init)
    CompletionOutput.capture_results = CompletionOutput.capture_rows = None
    RequestOutput.capture_results = property(_first_capture_results)
    RequestOutput.steering_applied = None
    for request in (ChatCompletionRequest, CompletionRequest, ResponsesRequest):
        _wrap(request, "to_sampling_params", _to_sampling_params)
    for request in (ChatCompletionRequest, CompletionRequest):
        _wrap(request, "to_beam_search_params", _to_beam_search_params)
    batch_runner = sys.modules.get("vllm.entrypoints.launchers.run_batch")
    if batch_runner is not None:
        _wrap(batch_runner, "run_batch", _run_batch)
        _wrap(batch_runner, "run_request", _run_request)


def _wrap_assign_request_id(owner: Any) -> None:
    """vLLM's is a static method; ours needs the instance, on which the engine's capabilities are kept."""
    original = owner.__dict__["assign_request_id"]
    if not isinstance(original, staticmethod):
        return

    def assign_request_id(self: Any, request: Any) -> None:
        from vllm_steer.frontend.context import check_engine_request

        check_engine_request(self, request)
        original.__func__(request)

    owner.assign_request_id = assign_request_id


def _prompt_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``prompt`` of ``add_request(self, request_id, prompt, params, ...)``."""
    return args[2] if len(args) > 2 else kwargs.get("prompt")


def _params_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``params``, or what vLLM takes in their place: those of an engine request that the caller has made."""
    from vllm.v1.engine import EngineCoreRequest

    prompt = _prompt_in(args, kwargs)
    if isinstance(prompt, EngineCoreRequest):
        return prompt.sampling_params
    return args[3] if len(args) > 3 else kwargs.get("params")


def _with_params(args: tuple[Any, ...], kwargs: dict[str, Any], params: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with others of these."""
    from vllm.v1.engine import EngineCoreRequest

    prompt = _prompt_in(args, kwargs)
    if isinstance(prompt, EngineCoreRequest):
        # vLLM's own from here on, which gives it its id.
        prompt.sampling_params = params
        return args, kwargs
    if len(args) > 3:
        return (*args[:3], params, *args[4:]), kwargs
    return args, {**kwargs, "params": params}


def _add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(*args: Any, **kwargs: Any) -> Any:
        from vllm_steer.frontend.context import admitted, engine_context

        params = _params_in(args, kwargs)
        wanted = admitted(engine_context(args[0]), params)
        if wanted is not params:
            args, kwargs = _with_params(args, kwargs, wanted)
        return original(*args, **kwargs)

    return add_request


def _add_request_async(original: Callable[..., Any]) -> Callable[..., Any]:
    async def add_request(*args: Any, **kwargs: Any) -> Any:
        from vllm_steer.errors import SteeringError
        from vllm_steer.frontend.context import admitted_soon, refuse_session

        try:
            params = _params_in(args, kwargs)
            wanted = await admitted_soon(args[0], params)
            if isinstance(_prompt_in(args, kwargs), AsyncGenerator):
                refuse_session(wanted)
            if wanted is not params:
                args, kwargs = _with_params(args, kwargs, wanted)
            return await original(*args, **kwargs)
        except SteeringError as error:
            from vllm_steer.server.http.request_fields import refused

            # vLLM takes any other error for a failure of its own: HTTP 500, without a word about the reason.
            raise refused(error) from error

    return add_request


def _output_processor_add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_steer.frontend.applied import note_applied
        from vllm_steer.frontend.context import context_of, refuse_session
        from vllm_steer.frontend.outputs import begin
        from vllm_steer.frontend.request_state import SteeredSample
        from vllm_steer.metrics.requests import count_request
        from vllm_steer.params import leave_to_engine, program_bytes
        from vllm_steer.server.auth.current_key import salt_request
        from vllm_steer.server.http.request_context import track_sample

        if request.resumable:
            refuse_session(request.sampling_params)
        salt_request(request)
        original(self, request, *args, **kwargs)
        if program_bytes(request.sampling_params) is not None:
            self.request_states[request.request_id].__class__ = SteeredSample
        begin(self, request)
        note_applied(self, request)
        track_sample(self, request)
        count_request(self, request)
        served = context_of(self)
        leave_to_engine(request, None if served is None else served.shelf)

    return add_request


def _process_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_steer.engine.row_sender import ROWS_REQUEST_ID
    from vllm_steer.frontend.outputs import consumers_held_back, take_rows

    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if engine_core_outputs and engine_core_outputs[0].request_id == ROWS_REQUEST_ID:
            engine_core_outputs = take_rows(self, engine_core_outputs)
        with consumers_held_back(self):
            return original(self, engine_core_outputs, *args, **kwargs)

    return process_outputs


def _request_output_add(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM merges the outputs that a slow reader of a stream has not taken yet, field by field."""

    def add(self: Any, next_output: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_steer.capture.deltas import joined

        earlier = {o.index: o.capture_rows for o in self.outputs}
        new = {o.index: o.capture_rows for o in next_output.outputs}
        original(self, next_output, *args, **kwargs)
        finished = {o.index: o.capture_results for o in next_output.outputs if o.capture_results is not None}
        for output in self.outputs:
            output.capture_results = finished.get(output.index, output.capture_results)
            output.capture_rows = joined(earlier.get(output.index), new.get(output.index))

    return add


def _first_capture_results(request_output: Any) -> Any:
    """``RequestOutput.capture_results``: those of the first sample."""
    return request_output.outputs[0].capture_results if request_output.outputs else None


def _to_sampling_params(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_steer.server.http.request_fields import apply_to_params

        return apply_to_params(self, original(self, *args, **kwargs))

    return to_sampling_params


def _to_beam_search_params(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_beam_search_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_steer.server.http.request_fields import refuse_beam_search

        refuse_beam_search(self)
        return original(self, *args, **kwargs)

    return to_beam_search_params


def _extract_prompt_len(original: Callable[..., Any]) -> Callable[..., Any]:
    def extract_prompt_len(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_steer.server.http.request_context import note_prompt_len

        length = original(self, *args, **kwargs)
        note_prompt_len(length)
        return length

    return extract_prompt_len


def _stat_logger_manager_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        from vllm_steer.metrics.stat_logger import join_stat_loggers

        original(self, vllm_config, *args, **kwargs)
        join_stat_loggers(self, vllm_config)

    return __init__


def _run_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    async def run_batch(engine_client: Any, args: Any) -> None:
        from vllm_steer.server.batch import run

        await run(original, engine_client, args)

    return run_batch


def _run_request(original: Callable[..., Any]) -> Callable[..., Any]:
    async def run_request(serving_engine_func: Any, request: Any, tracker: Any) -> Any:
        from vllm_steer.server.batch import run_line

        return await run_line(original, serving_engine_func, request, tracker)

    return run_request
