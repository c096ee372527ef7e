# SPDX-License-Identifier: Apache-2.0
"""Between a request and the engine: every request is checked here, in the front end's process, and nowhere later.

What the engine serves is asked of its workers once (they have the model in hand) and kept on the front end's input
processor, which every way in shares: ``LLM``, ``AsyncLLM`` and the API server.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine.core_client import MPClient

from vllm_steer.capture.consumers.memory import STREAM, is_streamed
from vllm_steer.capture.manager import CaptureManager
from vllm_steer.capture.server_wide import with_captures
from vllm_steer.config import SteeringConfig, from_vllm_config, rows_of_all_stages
from vllm_steer.engine.capabilities import Capabilities
from vllm_steer.errors import SteeringError
from vllm_steer.metrics.collectors import start as start_metrics
from vllm_steer.params import (
    CAPTURE_KEY,
    EXTRA_KEY,
    FILE_KEY,
    MODULES_KEY,
    capture_specs,
    program_bytes,
    program_of,
)
from vllm_steer.program.program_files import ProgramFileCache
from vllm_steer.registry.directory import DirectoryStore
from vllm_steer.registry.index import RegistryLimits
from vllm_steer.registry.registry import SteeringRegistry
from vllm_steer.spec.references import MODULES_FIELD

_RPC = "steering_capabilities"
_KEPT = "_steering_served"
_OPTIONS = "_steering_consumer_options"
CONSUMERS_VARIABLE = "VLLM_STEER_CAPTURE_CONSUMERS"
_REGISTRY = "_steering_registry_options"
REGISTRY_VARIABLE = "VLLM_STEER_REGISTRY"
NOT_ENABLED = (
    "this engine was started without steering, so it would be ignored; start it with --enable-steering "
    "(LLM(enable_steering=True))"
)
NO_ROWS_OF_EARLIER_STAGES = (
    "is not served: under pipeline parallelism, rows of earlier stages come out through vLLM's executor of local "
    "processes only (distributed_executor_backend mp, no encoder-cache connector); use that, or tensor parallelism"
)


class RegistryOptions(msgspec.Struct, frozen=True):
    """Where modules are kept, and which there are from the start."""

    folder: str | None = None
    """None: in this process."""
    modules: dict[str, str] = {}
    """Paths of safetensors files by name."""
    limits: RegistryLimits = RegistryLimits()
    """How much there may be of them."""

    @classmethod
    def of(cls, folder: str | Path | None, modules: Mapping[str, str | Path] | None) -> RegistryOptions:
        """From what a user gives."""
        paths = {name: str(path) for name, path in (modules or {}).items()}
        return cls(None if folder is None else str(folder), paths)


@dataclass(frozen=True)
class EngineContext:
    """What one engine client checks requests against, and hands captures to."""

    capabilities: Capabilities
    desk: CaptureManager
    registry: SteeringRegistry
    model_name: str = ""
    """What metrics call the model, as vLLM's do."""
    shelf: ProgramFileCache | None = None
    """None where the engine's process may not see this one's files, or is this one."""

    def check(self, params: Any, prompt_len: int | None) -> None:
        """Raise :class:`SteeringError` unless this engine serves these parameters exactly as asked."""
        program, specs = program_of(params), capture_specs(params)
        self.desk.check(specs)
        if program is not None:
            self.capabilities.check(program, prompt_len, None if prompt_len is None else params.max_tokens)
        for name, spec in specs:
            if is_streamed(name, spec) and params.output_kind != RequestOutputKind.DELTA:
                raise SteeringError(
                    f"capture.{name}.{STREAM}",
                    "rows come with the pieces of a stream: use AsyncLLM with output_kind=RequestOutputKind.DELTA",
                )


def engine_context(llm_engine: Any) -> EngineContext | None:
    """What an ``LLMEngine`` serves; None where steering is not enabled."""
    kept = known_engine_context(llm_engine)
    if kept is not None:
        return kept
    config = from_vllm_config(llm_engine.vllm_config)
    return None if config is None else _keep(llm_engine, llm_engine.collective_rpc(_RPC), config)


async def ensure_engine_context(engine_client: Any) -> EngineContext | None:
    """What an ``AsyncLLM`` serves; None where steering is not enabled."""
    kept = known_engine_context(engine_client)
    if kept is not None:
        return kept
    config = from_vllm_config(engine_client.vllm_config)
    return None if config is None else _keep(engine_client, await engine_client.collective_rpc(_RPC), config)


def set_consumers(engine: Any, options: Mapping[str, Mapping[str, Any]]) -> None:
    """Which consumers an engine client has beside ``memory``; to be called before it serves its first request."""
    setattr(engine, _OPTIONS, options)


def set_registry(engine: Any, options: RegistryOptions) -> None:
    """Where an engine client keeps modules; to be called before it serves its first request."""
    setattr(engine, _REGISTRY, options)


def known_engine_context(engine: Any) -> EngineContext | None:
    """What an engine client serves, if it has been asked before."""
    return getattr(engine.input_processor, _KEPT, None)


def _keep(engine: Any, reports: Any, config: SteeringConfig) -> EngineContext:
    kept = known_engine_context(engine)
    if kept is not None:
        # Two first requests waited for the same answer.
        return kept
    no_capture = None if rows_of_all_stages(engine.vllm_config) else NO_ROWS_OF_EARLIER_STAGES
    capabilities = Capabilities.merge(reports, config, no_capture, engine.vllm_config.num_speculative_tokens)
    options = getattr(engine, _OPTIONS, None)
    if options is None:
        # Set by the server's flag; API server processes inherit it.
        options = json.loads(os.environ.get(CONSUMERS_VARIABLE, "{}"))
    served_name = engine.vllm_config.model_config.served_model_name
    model = served_name if isinstance(served_name, str) else str(engine.vllm_config.model_config.model)
    start_metrics({"model_name": (model,)})
    served = EngineContext(
        capabilities,
        CaptureManager(capabilities, model, options),
        _registry(engine, capabilities, model),
        model,
        ProgramFileCache() if _shares_files(engine) else None,
    )
    setattr(engine.input_processor, _KEPT, served)
    setattr(engine.output_processor, _KEPT, served)
    # Where nobody closes it earlier: with the engine, or at the end of the process. Files of many requests are complete
    # then, and not before.
    weakref.finalize(engine, served.desk.let_go)
    if served.shelf is not None:
        weakref.finalize(engine, served.shelf.close)
    return served


def _shares_files(engine: Any) -> bool:
    """Whether every engine core of this client is another process of this host."""
    if not isinstance(getattr(engine, "engine_core", None), MPClient):
        return False
    parallel = engine.vllm_config.parallel_config
    return bool(
        parallel.data_parallel_size_local == parallel.data_parallel_size and parallel.data_parallel_backend == "mp"
    )


def _registry(engine: Any, capabilities: Capabilities, model: str) -> SteeringRegistry:
    options: RegistryOptions | None = getattr(engine, _REGISTRY, None)
    if options is None:
        # Set by the server's flags; API server processes inherit it.
        options = msgspec.json.decode(os.environ.get(REGISTRY_VARIABLE, "{}"), type=RegistryOptions)
    store = None if options.folder is None else DirectoryStore(options.folder)
    registry = SteeringRegistry(capabilities, store, options.limits, model_name=model)
    for name, path in options.modules.items():
        registry.ensure_file(name, path)
    return registry


def context_of(output_processor: Any) -> EngineContext | None:
    """What the engine client serves that this output processor belongs to; None where steering is not enabled."""
    return getattr(output_processor, _KEPT, None)


def capture_manager_of(output_processor: Any) -> CaptureManager:
    """The desk of the engine client that this output processor belongs to."""
    served: EngineContext = getattr(output_processor, _KEPT)
    return served.desk


def admitted(served: EngineContext | None, params: Any) -> Any:
    """A request's parameters with all that this engine client applies to it: global steering, the modules that it
    names, the captures that are made of every request. A copy where there is any of that.

    Raises :class:`SteeringError`.
    """
    if served is None or not isinstance(params, VllmSamplingParams):
        return params
    extra = params.extra_args or {}
    composed = served.registry.compose(extra)
    if composed is not extra:
        params = copy.copy(params)
        params.extra_args = composed
    return with_captures(params, served.desk.server_wide) if served.desk.server_wide else params


async def admitted_soon(engine_client: Any, params: Any) -> Any:
    """As :func:`admitted`, in front of an ``AsyncLLM``; files are not read in its event loop."""
    served = await ensure_engine_context(engine_client)
    if served is not None and served.registry.is_stale():
        await asyncio.to_thread(served.registry.snapshot)
    return admitted(served, params)


def check_params(params: Any, served: EngineContext | None, prompt_len: int | None = None) -> None:
    """Raise :class:`SteeringError` unless these sampling parameters can be served exactly as asked."""
    if program_bytes(params) is None:
        return
    if served is None:
        raise SteeringError("steering", NOT_ENABLED)
    served.check(params, prompt_len)


def refuse_session(params: Any) -> None:
    """Raise :class:`SteeringError` where a session of streaming input, or a piece of one, asks for anything of ours.

    vLLM gives a session its id by a request that is none, the signal of its end, and sends its pieces, each of which
    may have parameters of its own, past :func:`check_engine_request`.
    """
    extra = getattr(params, "extra_args", None) or {}
    if any(key in extra for key in (EXTRA_KEY, CAPTURE_KEY, MODULES_KEY, FILE_KEY)):
        raise SteeringError(
            "steering",
            "streaming input turns outputs into prompt, which steering does not define yet; send whole prompts",
        )


def check_engine_request(input_processor: Any, request: Any) -> None:
    """The last check before a request leaves the front end; the prompt is tokenised by now."""
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    if MODULES_KEY in extra:
        raise SteeringError(MODULES_FIELD, NOT_ENABLED)
    if FILE_KEY in extra:
        raise SteeringError(f"extra_args.{FILE_KEY}", "is not for clients")
    if program_bytes(request.sampling_params) is None:
        if capture_specs(request.sampling_params):
            raise SteeringError("extra_args.steer_capture", "comes without its program; use capture instead")
        return
    if request.resumable:
        refuse_session(request.sampling_params)
    prompt_len = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
    check_params(request.sampling_params, getattr(input_processor, _KEPT, None), prompt_len)
