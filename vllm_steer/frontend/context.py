# SPDX-License-Identifier: Apache-2.0
"""The state of one engine client: what its engine supports, its captures, its registry.

The workers, which hold the model, report once what the engine supports. The context is stored on vLLM's input and
output processors, which ``LLM``, ``AsyncLLM`` and the API server all use.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_steer.capture.consumers.memory import STREAM, is_streamed
from vllm_steer.capture.manager import CaptureManager
from vllm_steer.compat.internals import MPClient, RequestOutputKind
from vllm_steer.config import SteeringConfig, from_vllm_config, rows_of_all_stages
from vllm_steer.engine.capabilities import Capabilities
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.controllers import read_controller
from vllm_steer.frontend.part_markers import PartMarkers
from vllm_steer.metrics.collectors import start as start_metrics
from vllm_steer.params import capture_specs, program_of
from vllm_steer.program.program_files import ProgramFileCache
from vllm_steer.registry.index import RegistryLimits
from vllm_steer.registry.location import parse_location, show_location
from vllm_steer.registry.registry import SteeringRegistry
from vllm_steer.registry.storage import open_store
from vllm_steer.request.scalars import shown
from vllm_steer.settings import CONSUMERS_VARIABLE, CONTROLLER_VARIABLE, REGISTRY_VARIABLE

if TYPE_CHECKING:
    from vllm_steer.frontend.controller_runner import ControllerRunner

NOT_ENABLED = (
    "the engine runs without steering; start it with --enable-steering, LLM(enable_steering=True) or "
    "AsyncEngineArgs(**engine_kwargs())"
)
NO_ROWS_OF_EARLIER_STAGES = (
    "not supported here with pipeline parallelism; set distributed_executor_backend='mp' or 'ray', remove "
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 and the encoder-cache connector, or use tensor parallelism instead"
)
NO_READOUTS_ACROSS_STAGES = (
    "readouts, gates and stops are not supported with pipeline parallelism; use tensor parallelism"
)
_CAPABILITIES_RPC = "steering_capabilities"
_CONTEXT = "_steering_context"
_OPTIONS = "_steering_options"


class RegistryOptions(msgspec.Struct, frozen=True):
    """Location of the registry, and the modules that it contains at start."""

    folder: str | None = None
    """Folder or database URL of the registry; None keeps it in the memory of this process."""
    modules: dict[str, str] = {}
    """Paths of module or vector files by module name."""
    limits: RegistryLimits = RegistryLimits()
    """Largest number and size of modules."""

    def __repr__(self) -> str:
        folder = None if self.folder is None else show_location(self.folder)
        return f"RegistryOptions({folder!r}, modules={self.modules!r}, limits={self.limits!r})"

    @classmethod
    def of(cls, folder: str | Path | None, modules: Mapping[str, str | Path] | None) -> RegistryOptions:
        """Return the options with paths as strings; raise SteeringError if ``modules`` is not ``{name: path}``."""
        if modules is not None and not isinstance(modules, Mapping):
            raise SteeringError(
                "steering_modules",
                f'must be {{name: path}} such as {{"calm": "calm.safetensors"}}, not {shown(modules)}',
            )
        paths = {name: str(path) for name, path in (modules or {}).items()}
        return cls(None if folder is None else parse_location(str(folder), "steering_registry"), paths)


@dataclass(frozen=True)
class EngineContext:
    """Capabilities, captures and modules of one engine client."""

    capabilities: Capabilities
    capture_manager: CaptureManager
    registry: SteeringRegistry
    model_name: str = ""
    """The model's name in metrics, as in vLLM's."""
    program_files: ProgramFileCache | None = None
    """Files that pass large programs to the engine; None if the engine runs in this process or on another host."""
    controllers: ControllerRunner | None = None
    """Runs the controller; None if none is switched on."""
    markers: PartMarkers | None = None
    """Tokens that mark parts of conversations."""

    def check(self, params: Any, prompt_len: int | None) -> None:
        """Raise :class:`SteeringError` unless this engine serves ``params`` exactly as written.

        Args:
            params: Complete sampling parameters.
            prompt_len: Length of the prompt in tokens; None if it is not tokenised yet.
        """
        program, specs = program_of(params), capture_specs(params)
        self.capture_manager.check(specs)
        if program is not None and self.controllers is not None and program.layout.live and program.readouts:
            self.controllers.check()
        if program is not None:
            self.capabilities.check(program, prompt_len, None if prompt_len is None else params.max_tokens)
        for name, spec in specs:
            if is_streamed(name, spec) and params.output_kind != RequestOutputKind.DELTA:
                raise SteeringError(
                    f"capture.{name}.{STREAM}",
                    "rows are streamed with deltas only; use AsyncLLM with output_kind=RequestOutputKind.DELTA",
                )


def engine_context(llm_engine: Any) -> EngineContext | None:
    """Return the context of an ``LLMEngine``, or None if steering is not enabled."""
    known = known_engine_context(llm_engine)
    if known is not None:
        return known
    config = from_vllm_config(llm_engine.vllm_config)
    return None if config is None else _create(llm_engine, llm_engine.collective_rpc(_CAPABILITIES_RPC), config)


async def ensure_engine_context(engine_client: Any) -> EngineContext | None:
    """Return the context of an ``AsyncLLM``, or None if steering is not enabled."""
    known = known_engine_context(engine_client)
    if known is not None:
        return known
    config = from_vllm_config(engine_client.vllm_config)
    if config is None:
        return None
    return _create(engine_client, await engine_client.collective_rpc(_CAPABILITIES_RPC), config)


def known_engine_context(engine: Any) -> EngineContext | None:
    """Return the context of an engine client if it exists already."""
    return context_of(engine.input_processor)


def context_of(processor: Any) -> EngineContext | None:
    """Return the context of the engine client of an input or output processor, or None without steering."""
    return getattr(processor, _CONTEXT, None)


def set_options(
    engine: Any,
    *,
    consumers: Mapping[str, Mapping[str, Any]] | None = None,
    controller: Mapping[str, Any] | None = None,
    registry: RegistryOptions | None = None,
) -> None:
    """Set all options of an engine client, before its first request. An option that is None comes from the environment.

    Args:
        engine: The client.
        consumers: The consumers beside ``memory``.
        controller: ``{name: options}``.
        registry: Where modules are stored.
    """
    setattr(engine, _OPTIONS, {"consumers": consumers, "controller": controller, "registry": registry})


def _option(engine: Any, name: str) -> Any:
    return getattr(engine, _OPTIONS, {}).get(name)


def _create(engine: Any, reports: Any, config: SteeringConfig) -> EngineContext:
    """Create the context of an engine client from its workers' reports."""
    known = known_engine_context(engine)
    if known is not None:
        # Two concurrent first requests waited for the same reports.
        return known
    vllm_config = engine.vllm_config
    no_capture = None if rows_of_all_stages(vllm_config) else NO_ROWS_OF_EARLIER_STAGES
    no_readouts = NO_READOUTS_ACROSS_STAGES if vllm_config.parallel_config.pipeline_parallel_size > 1 else None
    capabilities = Capabilities.merge(reports, config, no_capture, vllm_config.num_speculative_tokens, no_readouts)
    served_name = vllm_config.model_config.served_model_name
    model = served_name if isinstance(served_name, str) else str(vllm_config.model_config.model)
    start_metrics({"model_name": (model,)})
    capture_manager = CaptureManager(capabilities, model, _consumer_options(engine))
    try:
        context = EngineContext(
            capabilities,
            capture_manager,
            _registry(engine, capabilities, model, config),
            model,
            ProgramFileCache() if _shares_files(engine) else None,
            _controllers(engine),
            PartMarkers(vllm_config, config.parts, config.tool_parser, config.chat_template),
        )
    except BaseException:
        capture_manager.close()  # the names of runs are free for the next start
        raise
    setattr(engine.input_processor, _CONTEXT, context)
    setattr(engine.output_processor, _CONTEXT, context)
    # Closes the consumers when the engine is deleted or the process exits, which completes files of several requests.
    weakref.finalize(engine, context.capture_manager.close_from_finalizer)
    if context.program_files is not None:
        weakref.finalize(engine, context.program_files.close)
    return context


def _consumer_options(engine: Any) -> Mapping[str, Mapping[str, Any]]:
    options: Mapping[str, Mapping[str, Any]] | None = _option(engine, "consumers")
    if options is None:
        # The server's flag sets the variable; API server processes inherit it.
        options = json.loads(os.environ.get(CONSUMERS_VARIABLE, "{}"))
    files = options.get("filesystem", {})
    if files.get("run") is None:
        return options
    parallel = engine.vllm_config.parallel_config
    if parallel._api_process_count > 1:
        # Each API server numbers its requests from 0, so each has a run of its own.
        return {**options, "filesystem": {**files, "run": f"{files['run']}-{parallel._api_process_rank}"}}
    return options


def _controllers(engine: Any) -> ControllerRunner | None:
    given: Mapping[str, Any] | None = _option(engine, "controller")
    if given is None and not hasattr(engine, "step"):
        # An AsyncLLM. The server's flag sets the variable; API server processes inherit it.
        given = json.loads(os.environ.get(CONTROLLER_VARIABLE, "{}"))
    if not given:
        return None
    from vllm_steer.frontend.controller_runner import ControllerRunner  # it reads this module's contexts

    return ControllerRunner(engine, *read_controller(given, "steering_controller"))


def _shares_files(engine: Any) -> bool:
    """Return whether every engine core of this client is another process on this host."""
    if not isinstance(getattr(engine, "engine_core", None), MPClient):
        return False
    parallel = engine.vllm_config.parallel_config
    return bool(
        parallel.data_parallel_size_local == parallel.data_parallel_size and parallel.data_parallel_backend == "mp"
    )


def _registry(engine: Any, capabilities: Capabilities, model: str, config: SteeringConfig) -> SteeringRegistry:
    options: RegistryOptions | None = _option(engine, "registry")
    if options is None:
        # The server's flags set the variable; API server processes inherit it.
        options = msgspec.json.decode(os.environ.get(REGISTRY_VARIABLE, "{}"), type=RegistryOptions)
    store = None if options.folder is None else open_store(options.folder)
    registry = SteeringRegistry(
        capabilities,
        store,
        options.limits,
        model_name=model,
        saes=config.saes,
        centring=capabilities.facts.get("centring", "unknown"),
        sae_any_site=config.sae_any_site,
    )
    for name, path in options.modules.items():
        registry.ensure_file(name, path)
    return registry
