# SPDX-License-Identifier: Apache-2.0
"""The path of a request through vLLM and this package, stage by stage, in order.

Each row names a method of vLLM, the function of ours that joins it, and what that function gets and passes on. This is
the complete list: :func:`vllm_steer.compat.wraps.install` wraps exactly the methods listed here, and a test compares
the ``OVERRIDE`` rows with the methods that our subclasses override.

====================================  ==================================================================================
wrapped, and not joined through       the reason
a plugin interface of vLLM
====================================  ==================================================================================
``EngineArgs``                        plugins cannot add flags to ``vllm serve`` or check an engine's settings
``SamplingParams.__repr__``           logs and ``print`` would write every vector of a program
``to_sampling_params``                request classes ignore fields that they do not know
``to_beam_search_params``             beam search would ignore them as well, and its prompts grow
``_extract_prompt_len``               a streamed response has started when the engine checks the prompt
``render_chat``                       tokens alone do not tell a template's special tokens from those in a content
``add_request`` (engines)             global steering and modules become part of the request here
``assign_request_id``                 the last step that all entry points share; the request is complete
``OutputProcessor``                   outputs have no field for captured rows; their state has to follow each sample
``RequestOutput.add``                 merging outputs would lose captured rows
``StatLoggerManager``                 vLLM loads stat logger plugins in ``AsyncLLM`` only
``run_busy_loop``, ...                all frames of a step need room in Python's stack
``AsyncLLM.shutdown``                 API servers would close their connection to the engine ahead of their streams
``run_batch``, ``run_request``        lines of a batch file do not pass through the server's middleware
``CompletionStreamResponse``, ...     chunks of streams have no fields for readouts
====================================  ==================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from vllm_steer.compat.wraps import How, Join

BEFORE, AFTER, RESULT, AROUND = How.BEFORE, How.AFTER, How.RESULT, How.AROUND
REPLACE, OVERRIDE = How.REPLACE, How.OVERRIDE


@dataclass(frozen=True)
class Stage:
    """One stage of a request's path."""

    name: str
    takes: str
    """Input of the stage."""
    passes_on: str
    """Output to the next stage."""
    joins: tuple[Join, ...]


_OPENAI = "vllm.entrypoints.openai"
_CHAT = f"{_OPENAI}.chat_completion.protocol:ChatCompletionRequest"
_COMPLETION = f"{_OPENAI}.completion.protocol:CompletionRequest"
_RESPONSES = f"{_OPENAI}.responses.protocol:ResponsesRequest"
_TRANSCRIPTION = "vllm.entrypoints.speech_to_text.transcription.protocol:TranscriptionRequest"
_TRANSLATION = "vllm.entrypoints.speech_to_text.translation.protocol:TranslationRequest"
_BATCH = "vllm.entrypoints.launchers.run_batch"
_OUTPUT_PROCESSOR = "vllm.v1.engine.output_processor:OutputProcessor"
_REQUEST_STATE = "vllm.v1.engine.output_processor:RequestState"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_MODEL_STATE = "vllm.v1.worker.gpu.model_states.interface:ModelState"

_FIELDS = "vllm_steer.server.http.apply_fields"
_CONTEXT = "vllm_steer.server.http.request_context"
_CHUNKS = "vllm_steer.server.http.stream_chunks"
_WITHOUT = "vllm_steer.server.without_steering"
_FRONT_END = "vllm_steer.plugin.front_end"
_REQUESTS = "vllm_steer.frontend.requests"
_MESSAGES = "vllm_steer.frontend.messages"
_STEERED_STATE = "vllm_steer.plugin.request_state:SteeredRequestState"
_STEERING_WORKER = "vllm_steer.engine.worker:SteeringWorker"
_STEERING_SCHEDULER = "vllm_steer.engine.scheduler:SteeringSchedulerMixin"
_STEERING_V1 = "vllm_steer.engine.runner_v1:SteeringRunnerV1"
_STEERING_V2 = "vllm_steer.engine.runner_v2:SteeringRunnerV2"
_STEERING_STATE = "vllm_steer.engine.runner_v2:_steering_state"


def _overrides(theirs: str, ours: str, names: str) -> tuple[Join, ...]:
    """Return the methods of a class of vLLM that the methods of the same names of our subclass override."""
    return tuple(Join(f"{theirs}.{name}", OVERRIDE, f"{ours}.{name}") for name in names.split())


STARTUP: tuple[Join, ...] = (
    Join("vllm.engine.arg_utils:EngineArgs.add_cli_args", AFTER, "vllm_steer.server.flags:add_flags"),
    Join("vllm.engine.arg_utils:EngineArgs.from_cli_args", BEFORE, "vllm_steer.server.apply_flags:apply_flags"),
    Join(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config", AROUND, "vllm_steer.plugin.entry_point:engine_config"
    ),
)
"""Wrapped in every process of vLLM, when it loads its plugins; they run while an engine starts."""

LOGGING: tuple[Join, ...] = (Join("vllm.sampling_params:SamplingParams.__repr__", AROUND, "vllm_steer.params:shown"),)
"""Wrapped in all processes of an engine with steering."""

_SAMPLING = tuple(f"{request}.to_sampling_params" for request in (_CHAT, _COMPLETION, _RESPONSES))
_BEAM_SEARCH = tuple(
    f"{request}.to_beam_search_params" for request in (_CHAT, _COMPLETION, _TRANSCRIPTION, _TRANSLATION)
)
_OFFLINE = "vllm.v1.engine.llm_engine:LLMEngine.add_request"
_REQUEST_ID = "vllm.v1.engine.input_processor:InputProcessor.assign_request_id"

REQUEST_STAGES: tuple[Stage, ...] = (
    Stage(
        "parameters",
        "the steering and capture fields of a request body",
        "SamplingParams whose extra_args hold the compiled program",
        (
            Join(f"{_BATCH}:run_batch", AROUND, "vllm_steer.server.batch:run", only_if_imported=True),
            Join(f"{_BATCH}:run_request", AROUND, "vllm_steer.server.batch:run_request_line", only_if_imported=True),
            Join(
                "vllm.entrypoints.serve.engine.serving:BaseServing._extract_prompt_len",
                AROUND,
                f"{_CONTEXT}:record_prompt",
            ),
            *(Join(method, RESULT, f"{_FIELDS}:apply_to_params") for method in _SAMPLING),
            *(Join(method, BEFORE, f"{_FIELDS}:begin_beam_search") for method in _BEAM_SEARCH),
            *LOGGING,
        ),
    ),
    Stage(
        "chat prompt",
        "the messages of a chat",
        "an engine input: the tokens that the chat template renders, with the messages beside them",
        (
            Join("vllm.renderers.base:BaseRenderer.render_chat", AROUND, f"{_MESSAGES}:keep_messages"),
            Join("vllm.renderers.base:BaseRenderer.render_chat_async", AROUND, f"{_MESSAGES}:keep_messages_async"),
        ),
    ),
    Stage(
        "front-end check",
        "SamplingParams, of a request body or of LLM.generate",
        "SamplingParams that include global steering, modules and server-wide captures",
        (
            Join(_OFFLINE, AROUND, f"{_FRONT_END}:add_request"),
            Join("vllm.v1.engine.async_llm:AsyncLLM.add_request", AROUND, f"{_FIELDS}:add_request"),
            Join("vllm.v1.engine.async_llm:AsyncLLM.add_request", AROUND, f"{_FRONT_END}:add_request_async"),
        ),
    ),
    Stage(
        "engine request",
        "an EngineCoreRequest with a tokenised prompt",
        "the same request, checked and stripped, with a RequestState that collects its rows",
        (
            Join(_REQUEST_ID, BEFORE, f"{_REQUESTS}:check_engine_request", with_object=True),
            Join(f"{_OUTPUT_PROCESSOR}.add_request", BEFORE, f"{_REQUESTS}:check_resumable"),
            Join(f"{_OUTPUT_PROCESSOR}.add_request", BEFORE, "vllm_steer.server.auth.current_key:salt_request"),
            Join(f"{_OUTPUT_PROCESSOR}.add_request", BEFORE, "vllm_steer.frontend.user_hooks:separate_cache"),
            Join(f"{_OUTPUT_PROCESSOR}.add_request", AFTER, "vllm_steer.plugin.request_state:begin_sample"),
            Join(f"{_OUTPUT_PROCESSOR}.add_request", AFTER, f"{_CONTEXT}:track_sample"),
            Join(f"{_OUTPUT_PROCESSOR}.add_request", AFTER, f"{_REQUESTS}:count_sample"),
            Join(f"{_OUTPUT_PROCESSOR}.add_request", AFTER, f"{_REQUESTS}:strip_request"),
        ),
    ),
    Stage(
        "scheduler",
        "a vLLM Request",
        "a SchedulerOutput: requests that have room in the device tables, with steering in their block hashes",
        _overrides(
            _SCHEDULER,
            _STEERING_SCHEDULER,
            "add_request set_pause_state schedule _handle_blocked_waiting_request _get_local_prefix_cache_hit "
            "_reserve_prefill_lookahead _update_after_schedule _get_new_block_ids_to_zero",
        ),
    ),
    Stage(
        "runner",
        "a SchedulerOutput",
        "device tables that hold the programs, and the row of every token of the step",
        (
            *_overrides(_RUNNER_V1, _STEERING_V1, "_update_states _zero_block_ids _model_forward"),
            *_overrides(_RUNNER_V2, _STEERING_V2, "add_requests execute_model"),
            *(
                Join(f"{_MODEL_STATE}.{name}", OVERRIDE, _STEERING_STATE)
                for name in ("add_request", "remove_request", "preprocess_state", "prepare_inputs")
            ),
        ),
    ),
    Stage(
        "hook points",
        "the residual stream of a decoder layer, [tokens, hidden]",
        "the edited stream, and captured rows in a staging buffer",
        (Join("torch.nn:Module.forward", OVERRIDE, "vllm_steer.taps.tap:Tap.forward"),),
    ),
    Stage(
        "rows out",
        "captured rows of one step on the device",
        "outputs under a reserved request id that carry the rows, ahead of the step's outputs",
        (
            *_overrides(_RUNNER_V1, _STEERING_V1, "_sample sample_tokens"),
            *_overrides(_RUNNER_V2, _STEERING_V2, "sample sample_tokens"),
            *_overrides(_WORKER, _STEERING_WORKER, "sample_tokens"),
            *_overrides(
                "vllm.v1.executor.multiproc_executor:MultiprocExecutor",
                "vllm_steer.engine.executor:SteeringExecutor",
                "init_kv_output_aggregator",
            ),
            *_overrides(
                "vllm.distributed.kv_transfer.kv_connector.utils:KVOutputAggregator",
                "vllm_steer.engine.executor:RowAggregator",
                "aggregate",
            ),
            *_overrides(_SCHEDULER, _STEERING_SCHEDULER, "update_from_output _free_request"),
        ),
    ),
    Stage(
        "output processor",
        "EngineCoreOutputs",
        "RequestOutputs with captured rows, capture results and applied steering",
        (
            Join(
                "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
                AROUND,
                f"{_FRONT_END}:init_stat_logger_manager",
            ),
            Join(f"{_OUTPUT_PROCESSOR}.process_outputs", AROUND, f"{_FRONT_END}:process_outputs"),
            *_overrides(_REQUEST_STATE, _STEERED_STATE, "make_request_output _new_completion_output"),
            Join("vllm.outputs:RequestOutput.add", AROUND, f"{_FRONT_END}:merge_outputs"),
        ),
    ),
    Stage(
        "response",
        "RequestOutputs, and the captures that the request's context collected",
        "a response body with capture_results, readouts and steering_applied",
        (
            Join("vllm.v1.engine.async_llm:AsyncLLM.shutdown", AROUND, "vllm_steer.server.drain:shutdown"),
            *(
                Join(f"{_OPENAI}.{module}:{name}", REPLACE, f"{_CHUNKS}:{ours}", only_if_imported=True)
                for module, name, ours in (
                    ("completion.serving", "CompletionStreamResponse", "CompletionChunk"),
                    ("completion.serving", "CompletionResponseStreamChoice", "CompletionChoice"),
                    ("chat_completion.serving", "ChatCompletionStreamResponse", "ChatChunk"),
                    ("chat_completion.serving", "ChatCompletionResponseStreamChoice", "ChatChoice"),
                    ("chat_completion.serving", "DeltaMessage", "ChatDelta"),
                )
            ),
        ),
    ),
)
"""Stages of a request, in order. ``OVERRIDE`` rows are subclasses and wrap nothing; the others are wrapped in front
ends when the configuration of an engine with steering is made. Engine and worker processes wrap only :data:`LOGGING`,
:data:`BUSY_LOOPS`, :data:`MODEL`, :data:`CPU_LORA` and :data:`GRAPHS`."""

LIFECYCLE: tuple[Join, ...] = (
    *_overrides(_WORKER, _STEERING_WORKER, "init_device load_model sleep wake_up compile_or_warm_up_model"),
    *_overrides(_RUNNER_V1, _STEERING_V1, "load_model capture_model profile_run _dummy_run"),
    *_overrides(_RUNNER_V2, _STEERING_V2, "load_model profile_run profile_cudagraph_memory capture_model"),
    Join(f"{_MODEL_STATE}.prepare_dummy_inputs", OVERRIDE, _STEERING_STATE),
)
"""Overridden for loading, graph capture and sleep; no request passes here."""


_REDUCING: tuple[tuple[str, str], ...] = (
    ("deepseek_v32.nvidia.model", "fused_allreduce_rms_norm"),
    ("deepseek_v32.amd.model", "fused_allreduce_rms_norm"),
    ("minimax_m3.nvidia.model", "fused_allreduce_gemma_rms_norm"),
    ("minimax_m3.amd.model", "fused_allreduce_gemma_rms_norm"),
)
"""Modules of layers that reduce, add and norm in one function, and its name there."""

_STREAMS = "vllm_steer.models.streams"
MODEL: tuple[Join, ...] = (
    *(
        Join(f"vllm.models.{module}:{name}", AROUND, "vllm_steer.models.reduced_norm:reduce_and_norm")
        for module, name in _REDUCING
    ),
    Join("vllm.models.deepseek_v4.nvidia.model:mhc_fused_post_pre_tilelang", AROUND, f"{_STREAMS}:tap_streams"),
    Join("vllm.models.deepseek_v41.nvidia.model:mhc_shifted_post_pre", AROUND, f"{_STREAMS}:tap_streams"),
    Join("vllm.models.inkling.nvidia.model:_sconv_add_norm", AROUND, "vllm_steer.models.convolved:tap_sum"),
)
"""Wrapped in worker processes, each only when its model gets taps."""

CPU_LORA: tuple[Join, ...] = tuple(
    Join(f"vllm.lora.{module}:bgmv_{name}", REPLACE, f"vllm_steer.engine.cpu_workarounds:{name}")
    for module in ("ops.torch_ops.lora_ops", "punica_wrapper.punica_cpu")
    for name in ("expand", "expand_slice")
)
"""Replaced in workers on CPUs that serve LoRA adapters."""

BUSY_LOOPS: tuple[Join, ...] = tuple(
    Join(method, AROUND, "vllm_steer.engine.python_stack:run_loop", only_if_imported=True)
    for method in (
        "vllm.v1.engine.core:EngineCoreProc.run_busy_loop",
        "vllm.v1.engine.core:DPEngineCoreProc.run_busy_loop",
        "vllm.v1.executor.multiproc_executor:WorkerProc.worker_busy_loop",
    )
)
"""Wrapped in engine and worker processes before they begin to serve."""

GRAPHS: tuple[Join, ...] = (
    Join(
        "vllm.v1.worker.gpu.cudagraph_utils:graph_capture",
        AROUND,
        "vllm_steer.engine.cudagraph_sets:capture_on_one_stream",
    ),
)
"""Wrapped in worker processes of runner V2, ahead of the capture of CUDA graphs."""


def front_end_joins() -> tuple[Join, ...]:
    """Return the joins of all stages in order."""
    return tuple(chain.from_iterable(stage.joins for stage in REQUEST_STAGES))


def checks_without_steering(*, serves: bool) -> tuple[Join, ...]:
    """Return the joins in a front end whose engine runs without steering: they refuse its fields, once per request.

    Args:
        serves: Whether the engine is for a server or an ``AsyncLLM``.
    """
    at_params = Join(_REQUEST_ID, BEFORE, f"{_WITHOUT}:check_engine_request", with_object=True)
    if not serves:
        return (Join(_OFFLINE, AROUND, f"{_WITHOUT}:add_request"), at_params)
    return (
        *(Join(method, RESULT, f"{_WITHOUT}:check_body") for method in _SAMPLING),
        *(Join(method, BEFORE, f"{_WITHOUT}:check_beam_search") for method in _BEAM_SEARCH),
        at_params,
    )
