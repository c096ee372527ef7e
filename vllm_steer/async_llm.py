# SPDX-License-Identifier: Apache-2.0
"""``AsyncLLM`` with steering and capture."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from vllm_steer.capture.consumers import read_consumers
from vllm_steer.compat.internals import AsyncLLM as VllmAsyncLLM
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import (
    NOT_ENABLED,
    RegistryOptions,
    ensure_engine_context,
    set_options,
)
from vllm_steer.frontend.controllers import read_controller
from vllm_steer.frontend.live import LivePosition, samples_of, set_strength
from vllm_steer.registry.registry import SteeringRegistry

P = ParamSpec("P")
T = TypeVar("T")


class AsyncLLM(VllmAsyncLLM):  # type: ignore[misc]
    """vLLM's ``AsyncLLM`` with steering and capture; create it with `from_engine_args`.

    Examples:
        >>> from vllm import AsyncEngineArgs  # doctest: +SKIP
        >>> from vllm_steer import AsyncLLM, engine_kwargs  # doctest: +SKIP
        >>> llm = AsyncLLM.from_engine_args(  # doctest: +SKIP
        ...     AsyncEngineArgs(model="demo/model", **engine_kwargs()),
        ...     capture_consumers={"filesystem": {"root": "acts"}},
        ... )
    """

    @classmethod
    def from_engine_args(
        cls,
        engine_args: Any,
        *args: Any,
        capture_consumers: Mapping[str, Mapping[str, Any]] | None = None,
        steering_registry: str | Path | None = None,
        steering_modules: Mapping[str, str | Path] | None = None,
        steering_controller: Mapping[str, Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Create an engine.

        Args:
            engine_args: vLLM's ``AsyncEngineArgs(..., **vllm_steer.engine_kwargs())``. Without ``engine_kwargs`` the
                engine is stock vLLM, and requests with steering or capture are refused.
            *args: Further arguments of vLLM's method.
            capture_consumers: Options of capture consumers beside ``memory``, by name, as for ``LLM``.
            steering_registry: Folder or database URL that stores modules and global steering. By default they are
                kept in memory.
            steering_modules: Paths of module or vector files to register as modules, by name.
            steering_controller: The controller of requests with readouts and live strengths, ``{name: options}``; see
                `Controller`.
            **kwargs: Further arguments of vLLM's method.

        Raises:
            SteeringError: An argument is invalid, or has no effect because ``engine_args`` do not enable steering.
            IncompatibleError: The version or the settings of vLLM do not support steering.
        """
        given = {
            "capture_consumers": capture_consumers,
            "steering_registry": steering_registry,
            "steering_modules": steering_modules,
            "steering_controller": steering_controller,
        }
        if "steering" not in (engine_args.additional_config or {}):
            for name, value in given.items():
                if value is not None:
                    raise SteeringError(
                        name, "has no effect without steering; add **vllm_steer.engine_kwargs() to the AsyncEngineArgs"
                    )
        # Before the model is loaded, which takes long.
        consumers = read_consumers(capture_consumers)
        registry = RegistryOptions.of(steering_registry, steering_modules)
        if steering_controller is not None:
            read_controller(steering_controller, "steering_controller")
        engine: Self = super().from_engine_args(engine_args, *args, **kwargs)
        set_options(
            engine,
            consumers=None if capture_consumers is None else consumers,
            controller=steering_controller,
            registry=None if steering_registry is None and steering_modules is None else registry,
        )
        return engine

    @property
    def steering(self) -> AsyncSteering:
        """Registry of this engine: named modules and global steering."""
        return AsyncSteering(self)

    async def set_strength(self, request_id: str, **strengths: float) -> LivePosition:
        """Set live strengths of a running request; names are those of ``Edit(live=...)``.

        Args:
            request_id: The request's id, as given to ``generate``.
            **strengths: New factors by name.

        Returns:
            See `LLM.set_strength`.

        Raises:
            SteeringError: The request is not running or lacks a live strength, several have the id, or a
                value is not finite or too large.
        """
        return await set_strength(self, request_id, samples_of(self.output_processor, request_id), strengths)


def _in_thread(
    method: Callable[Concatenate[SteeringRegistry, P], T],
) -> Callable[Concatenate[AsyncSteering, P], Coroutine[Any, Any, T]]:
    """Return the coroutine that runs a method of `SteeringRegistry` in a thread."""

    @wraps(method)
    async def run(self: AsyncSteering, /, *args: P.args, **kwargs: P.kwargs) -> T:
        context = await ensure_engine_context(self._engine)
        if context is None:
            raise SteeringError("steering", NOT_ENABLED)
        return await asyncio.to_thread(method, context.registry, *args, **kwargs)

    return run


class AsyncSteering:
    """Asynchronous methods of `SteeringRegistry`, run in a thread."""

    def __init__(self, engine: VllmAsyncLLM) -> None:
        self._engine = engine

    register = _in_thread(SteeringRegistry.register)
    register_file = _in_thread(SteeringRegistry.register_file)
    list = _in_thread(SteeringRegistry.list)
    get = _in_thread(SteeringRegistry.get)
    delete = _in_thread(SteeringRegistry.delete)
    set = _in_thread(SteeringRegistry.set)
    clear = _in_thread(SteeringRegistry.clear)
    status = _in_thread(SteeringRegistry.status)
    snapshot = _in_thread(SteeringRegistry.snapshot)
