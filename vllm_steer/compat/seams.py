# SPDX-License-Identifier: Apache-2.0
"""Everything of vLLM that this package uses: one row per method, attribute, type and function, with the reason.

Wraps and overrides are the rows of :mod:`vllm_steer.compat.stages`. ``seams.json``, written by ``scripts/seams.py``,
holds the signature and the digest of the source of each seam in each version of vLLM. Tests compare the table with the
imports and attributes in this package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from vllm_steer.compat.stages import BUSY_LOOPS, CPU_LORA, GRAPHS, LIFECYCLE, MODEL, STARTUP, front_end_joins
from vllm_steer.compat.wraps import How


class Kind(Enum):
    """How a seam is used."""

    WRAP = "wrap"
    """A method around which a function of ours runs."""
    OVERRIDE = "override"
    """A method that a subclass of ours overrides."""
    ATTRIBUTE = "attribute"
    """An attribute or method of an internal object that we read, set or call."""
    IMPORT = "import"
    """A name that we import."""
    WIRE = "wire"
    """A type that vLLM sends between processes and that carries our data."""


@dataclass(frozen=True)
class Seam:
    """One use of vLLM.

    Attributes:
        path: ``module:qualified.name``.
        kind: How it is used.
        why: What for.
        ours: The function of ours that joins it, for wraps and overrides.
        moved_to: Place of the same name in later versions, or an empty string.
    """

    path: str
    kind: Kind
    why: str
    ours: str = ""
    moved_to: str = ""

    @property
    def places(self) -> tuple[str, ...]:
        """All places of the name, the latest first."""
        return (self.moved_to, self.path) if self.moved_to else (self.path,)


def _attributes(owner: str, why: str, names: str) -> Iterator[Seam]:
    return (Seam(f"{owner}.{name}", Kind.ATTRIBUTE, why) for name in names.split())


def _imports(why: str, *paths: str) -> Iterator[Seam]:
    return (Seam(path, Kind.IMPORT, why) for path in paths)


def _wire(why: str, *paths: str) -> Iterator[Seam]:
    return (Seam(path, Kind.WIRE, why) for path in paths)


_SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler"
_REQUEST: Final = "vllm.v1.request:Request"
_OUTPUT: Final = "vllm.v1.core.sched.output"
_V1: Final = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_V2: Final = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_PARALLEL: Final = "vllm.config.parallel:ParallelConfig"

_ENGINE: Final = (
    *_attributes(
        _SCHEDULER,
        "admission, cache hits and captured rows of requests",
        "block_size connector finish_requests hash_block_size kv_cache_config kv_cache_manager max_model_len "
        "max_num_scheduled_tokens num_spec_tokens pause_state requests scheduler_config vllm_config "
        "needs_kv_cache_zeroing",
    ),
    *_attributes(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        "cache hits end ahead of the first captured position",
        "coordinator empty_kv_cache_blocks truncate_computed_blocks",
    ),
    *_attributes(
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator",
        "tells which kinds of KV cache a model has",
        "single_type_managers",
    ),
    *_attributes(
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager",
        "blocks of edited requests are zeroed on CPUs before their next use",
        "_record_new_block_ids",
    ),
    *_attributes(
        _REQUEST,
        "the scheduler's view of a request: its program, its block hashes, its end",
        "_block_hasher block_hashes client_index get_finished_reason max_tokens mm_features num_computed_tokens "
        "num_prompt_tokens num_tokens request_id sampling_params skip_reading_prefix_cache status take_events "
        "trace_headers update_block_hashes",
    ),
    *_attributes(
        _V1,
        "the batch of a step of runner V1, and its loaded model",
        "device discard_request_mask get_model input_batch input_ids intermediate_tensors kv_cache_config kv_caches "
        "max_num_tokens model_config model_memory_usage positions query_start_loc requests scheduler_config "
        "vllm_config",
    ),
    *_attributes(
        "vllm.v1.worker.gpu_input_batch:InputBatch",
        "the batch of a step of runner V1",
        "generators num_computed_tokens_cpu req_ids",
    ),
    *_attributes(
        "vllm.v1.worker.gpu_input_batch:CachedRequestState",
        "programs of requests that resume after preemption",
        "num_prompt_tokens sampling_params",
    ),
    *_attributes(
        _V2,
        "the loaded model and the graphs of runner V2",
        "_dummy_run cudagraph_manager device max_num_reqs max_num_tokens model model_state vllm_config",
    ),
    *_wire("the batch of a step of runner V2", "vllm.v1.worker.gpu.input_batch:InputBatch"),
    *_attributes(
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager",
        "several sets of CUDA graphs take turns in one manager",
        "_capture_descs capture graphs",
    ),
    *_attributes(
        "vllm.compilation.cuda_graph:CUDAGraphWrapper",
        "piecewise graphs of each set",
        "_all_instances concrete_cudagraph_entries",
    ),
    *_attributes(
        "vllm.compilation.breakable_cudagraph:BreakableCUDAGraphWrapper",
        "piecewise graphs of each set",
        "_all_instances entries",
    ),
    Seam(
        "vllm.compilation.decorators:_support_torch_compile",
        Kind.ATTRIBUTE,
        "sets `_compile_prefix`, `_is_encoder`, `_compile_tag` and `do_not_compile`, which the copy without taps needs",
    ),
    *_attributes("vllm.v1.worker.gpu_worker:Worker", "the worker's parts", "device model_runner vllm_config"),
    *_attributes(
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor",
        "collects the outputs of all pipeline stages",
        "kv_output_aggregator",
    ),
    *_attributes(
        "vllm.forward_context:ForwardContext", "taps find their tables through the forward context", "no_compile_layers"
    ),
    *_attributes(
        "vllm.config.compilation:CompilationConfig",
        "registers the tables for the forward context, and our compiler pass",
        "inductor_compile_config static_forward_context",
    ),
    *_wire(
        "what the scheduler sends to the workers: programs, blocks, positions",
        f"{_OUTPUT}:SchedulerOutput",
        f"{_OUTPUT}:NewRequestData",
        f"{_OUTPUT}:CachedRequestData",
    ),
    *_wire("carries captured rows to the scheduler", "vllm.v1.outputs:ModelRunnerOutput"),
    *_wire(
        "carry captured rows and statistics to the front end",
        "vllm.v1.engine:EngineCoreOutput",
        "vllm.v1.engine:EngineCoreOutputs",
        "vllm.v1.metrics.stats:SchedulerStats",
    ),
    *_imports(
        "base classes and types of the engine's subclasses",
        _SCHEDULER,
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
        "vllm.v1.core.sched.interface:PauseState",
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor",
        "vllm.v1.executor.ray_executor_v2:RayExecutorV2",
        "vllm.v1.kv_cache_interface:FullAttentionSpec",
        "vllm.v1.outputs:AsyncModelRunnerOutput",
        "vllm.v1.request:RequestStatus",
        "vllm.v1.worker.cpu_worker:CPUWorker",
        "vllm.v1.worker.gpu_worker:Worker",
        _V1,
    ),
    *_imports(
        "CUDA graphs and compiled code of the model with and without taps",
        "vllm.compilation.backends:set_model_tag",
        "vllm.compilation.breakable_cudagraph:BreakableCUDAGraphWrapper",
        "vllm.compilation.cuda_graph:CUDAGraphWrapper",
        "vllm.compilation.passes.inductor_pass:InductorPass",
        "vllm.compilation.wrapper:TorchCompileWithNoGuardsWrapper",
        "vllm.config.compilation:CUDAGraphMode",
        "vllm.config:CompilationMode",
        "vllm.forward_context:get_forward_context",
    ),
    *_imports(
        "rows without an adapter on CPUs",
        "vllm.lora.ops.torch_ops.lora_ops:bgmv_expand",
        "vllm.lora.ops.torch_ops.lora_ops:bgmv_expand_slice",
    ),
    *_imports("keys of KV blocks", "vllm.utils.hashing:get_hash_fn_by_name"),
    *_imports("length of a prompt of tokens or embeddings", "vllm.utils:length_from_prompt_token_ids_or_embeds"),
    *_imports(
        "place of this process among the ranks, and its device",
        "vllm.distributed:get_pp_group",
        "vllm.distributed:get_tensor_model_parallel_rank",
        "vllm.distributed:get_tensor_model_parallel_world_size",
        "vllm.platforms:current_platform",
    ),
)

_FRONT_END: Final = (
    *_wire("carries the program of a request to the engine", "vllm.v1.engine:EngineCoreRequest"),
    *_attributes(
        "vllm.v1.engine.output_processor:RequestState",
        "the state of a sample, to which its captures belong",
        "detokenizer external_req_id output_kind parent_req prompt_len prompt_token_ids queue request_id request_index",
    ),
    *_attributes(
        "vllm.v1.engine.output_processor:OutputProcessor",
        "finds the state of a sample, ends the other samples of its request, and forgets them",
        "abort_requests parent_requests request_states",
    ),
    *_wire("names the requests that the engine has to abort", "vllm.v1.engine.output_processor:OutputProcessorOutput"),
    *_attributes("vllm.v1.engine.parallel_sampling:ParentRequest", "samples that share a request", "request_id"),
    *_attributes(
        "vllm.v1.engine.llm_engine:LLMEngine",
        "the context of an engine client is stored on its processors",
        "collective_rpc engine_core input_processor output_processor vllm_config",
    ),
    *_attributes(
        "vllm.v1.engine.async_llm:AsyncLLM",
        "the context of an engine client is stored on its processors; requests are ended at shutdown",
        "abort collective_rpc engine_core input_processor output_processor vllm_config",
    ),
    *_attributes("vllm.v1.engine.core_client:MPClient", "whether the engine is a child of this process", "resources"),
    *_attributes(
        "vllm.v1.engine.core_client:BackgroundResources",
        "whether the engine is a child of this process",
        "engine_manager",
    ),
    *_attributes(
        "vllm.v1.metrics.loggers:StatLoggerManager", "our logger runs ahead of vLLM's", "engine_indexes stat_loggers"
    ),
    *_attributes(
        _PARALLEL,
        "settings that conflict with steering, and the choice of the executor",
        "data_parallel_backend data_parallel_size data_parallel_size_local distributed_executor_backend "
        "enable_elastic_ep pipeline_parallel_size prefill_context_parallel_size use_sequence_parallel_moe "
        "use_ubatching",
    ),
    *_attributes(_PARALLEL, "API servers name their runs of captures", "_api_process_count _api_process_rank"),
    *_attributes(
        "vllm.config.vllm:VllmConfig",
        "settings that conflict with steering or size the tables",
        "additional_config cache_config compilation_config ec_transfer_config engram_config kernel_config "
        "kv_transfer_config model_config num_lookahead_tokens num_speculative_tokens parallel_config "
        "scheduler_config speculative_config structured_outputs_config",
    ),
    *_attributes(
        "vllm.config.model:ModelConfig",
        "settings that conflict with steering or size the tables",
        "architectures get_hidden_size get_vocab_size hf_text_config is_diffusion is_mm_prefix_lm max_model_len "
        "runner_type served_model_name",
    ),
    *_attributes(
        "vllm.config.engram:EngramConfig",
        "doctor builds a model without its tables of n-grams",
        "cpu_offload dp_shared_memory use_thp",
    ),
    *_attributes("vllm.config.cache:CacheConfig", "settings that conflict", "kv_sharing_fast_prefill"),
    *_attributes(
        "vllm.models.kimi_k3.nvidia.model:KimiDecoderLayer",
        "reads the running sum of Kimi K3 behind attention",
        "_post_attn_norm",
    ),
    *_attributes("vllm.config.speculative:SpeculativeConfig", "settings that conflict", "enable_adaptive_verification"),
    *_imports(
        "the tokens that begin and end reasoning and tool calls; some parsers keep them in `_parser_engine`",
        "vllm.reasoning.abs_reasoning_parsers:ReasoningParserManager",
        "vllm.tool_parsers.abstract_tool_parser:ToolParserManager",
    ),
    *_attributes(
        "vllm.reasoning.abs_reasoning_parsers:ReasoningParser",
        "the tokens that begin and end reasoning",
        "reasoning_end_str reasoning_start_str",
    ),
    *_attributes("vllm.config.structured_outputs:StructuredOutputsConfig", "the reasoning parser", "reasoning_parser"),
    *_attributes("vllm.v1.engine.input_processor:InputProcessor", "ids of marker tokens", "tokenizer"),
    *_attributes("vllm.v1.kv_cache_interface:FullAttentionSpec", "prompts that must not be split", "non_causal"),
    *_attributes(
        "vllm.multimodal.inputs:PlaceholderRange", "positions of image tokens", "extract_embeds_range length offset"
    ),
    *_attributes("vllm.multimodal.inputs:MultiModalFeatureSpec", "positions of image tokens", "mm_position modality"),
    *_imports(
        "base classes and types of the front end",
        "vllm.engine.arg_utils:AsyncEngineArgs",
        "vllm.entrypoints.llm:LLM",
        "vllm.outputs:CompletionOutput",
        "vllm.outputs:RequestOutput",
        "vllm.sampling_params:RequestOutputKind",
        "vllm.sampling_params:SamplingParams",
        "vllm.v1.engine.async_llm:AsyncLLM",
        "vllm.v1.engine.core_client:MPClient",
        "vllm.v1.engine.output_processor:RequestState",
        "vllm.v1.engine:FinishReason",
    ),
    *_imports("statistics of steps", "vllm.v1.metrics.loggers:AggregateStatLoggerBase"),
    *_imports(
        "metrics in the form of LLM.get_metrics",
        "vllm.v1.metrics.reader:Counter",
        "vllm.v1.metrics.reader:Gauge",
        "vllm.v1.metrics.reader:Histogram",
        "vllm.v1.metrics.reader:Metric",
    ),
    *_imports("HTTP 400 and 503", "vllm.exceptions:GracefulHTTPError", "vllm.exceptions:VLLMValidationError"),
    *_imports("fields of a request body", "vllm.entrypoints.openai.responses.protocol:ResponsesRequest"),
    *_imports(
        "dump the chunk with the usage of a stream",
        "vllm.entrypoints.openai.completion.protocol:CompletionStreamResponse",
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionStreamResponse",
    ),
    *_imports(
        "the command vllm-steer serve",
        "vllm.entrypoints.cli.serve:ServeSubcommand",
        "vllm.logger:configure_logging_from_args",
        "vllm.utils.argparse_utils:FlexibleArgumentParser",
    ),
    Seam(
        "vllm.entrypoints.serve.utils.api_utils:cli_env_setup",
        Kind.IMPORT,
        "the command vllm-steer serve",
        moved_to="vllm.entrypoints.common.startup:cli_env_setup",  # 0.33
    ),
)

_MODELS: Final = (
    *_imports("log in vLLM's format", "vllm.logger:init_logger"),
    *_imports("version and environment variables", "vllm:", "vllm:envs", "vllm:__version__"),
    *_imports(
        "finding the decoder layers of a model",
        "vllm.model_executor.models.interfaces:supports_multimodal",
        "vllm.model_executor.models.utils:PPMissingLayer",
    ),
    *_imports(
        "building a model without weights, for the doctor and the proof",
        "vllm:ModelRegistry",
        "vllm.config:set_current_vllm_config",
        "vllm.distributed:ensure_model_parallel_initialized",
        "vllm.distributed:init_distributed_environment",
        "vllm.engine.arg_utils:EngineArgs",
        "vllm.model_executor.model_loader.dummy_loader:DummyModelLoader",
        "vllm.model_executor.model_loader.utils:initialize_model",
        "vllm.model_executor.model_loader:register_model_loader",
        "vllm.transformers_utils.config:get_config",
        "vllm.utils.torch_utils:set_default_torch_dtype",
    ),
    *_imports("the oracle runs several engines in one process", "vllm.distributed:cleanup_dist_env_and_memory"),
    *_attributes(_SCHEDULER, "the oracle preempts requests", "_preempt_request"),
)

_JOINED: Final = {
    join.method: Seam(
        join.method, Kind.OVERRIDE if join.how is How.OVERRIDE else Kind.WRAP, "vllm_steer/compat/stages.py", join.runs
    )
    for join in (*STARTUP, *front_end_joins(), *LIFECYCLE, *MODEL, *CPU_LORA, *BUSY_LOOPS, *GRAPHS)
    if join.method.startswith("vllm.")
}

SEAMS: Final[tuple[Seam, ...]] = (*_JOINED.values(), *_ENGINE, *_FRONT_END, *_MODELS)
"""All seams, each path once per kind."""
