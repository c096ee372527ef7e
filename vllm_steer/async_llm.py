# SPDX-License-Identifier: Apache-2.0
"""``AsyncLLM`` with the registry of modules beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from vllm.v1.engine.async_llm import AsyncLLM as VllmAsyncLLM

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import NOT_ENABLED, RegistryOptions, ensure_engine_context, set_registry
from vllm_steer.registry.registry import SteeringRegistry
from vllm_steer.registry.schema import Deleted, GlobalSteering, ModuleInfo, ModuleList
from vllm_steer.spec.references import Reference

T = TypeVar("T")


class AsyncLLM(VllmAsyncLLM):  # type: ignore[misc]
    """vLLM's ``AsyncLLM``; ``from_engine_args(AsyncEngineArgs(..., **vllm_steer.engine_kwargs()))`` makes one."""

    @property
    def steering(self) -> AsyncSteering:
        """Named modules and global steering of this engine."""
        return AsyncSteering(self)

    def keep_modules(self, folder: str | Path | None = None, modules: Mapping[str, str | Path] | None = None) -> None:
        """Where modules are kept (None: in this process), and files of those that are there from the start.

        To be called before anything else is asked of the engine.
        """
        set_registry(self, RegistryOptions.of(folder, modules))


class AsyncSteering:
    """`SteeringRegistry` for code that must not block: the same methods, each to be awaited."""

    def __init__(self, engine: VllmAsyncLLM) -> None:
        self._engine = engine

    async def register(self, name: str, **content: Any) -> ModuleInfo:
        """As `SteeringRegistry.register`."""
        return await self._call(lambda registry: registry.register(name, **content))

    async def register_file(self, name: str, source: str | Path | bytes) -> ModuleInfo:
        """As `SteeringRegistry.register_file`."""
        return await self._call(lambda registry: registry.register_file(name, source))

    async def list(self) -> ModuleList:
        """As `SteeringRegistry.list`."""
        return await self._call(lambda registry: registry.list())

    async def get(self, reference: str | Reference, *, data: bool = False) -> ModuleInfo:
        """As `SteeringRegistry.get`."""
        return await self._call(lambda registry: registry.get(reference, data=data))

    async def delete(self, reference: str | Reference) -> Deleted:
        """As `SteeringRegistry.delete`."""
        return await self._call(lambda registry: registry.delete(reference))

    async def set(self, **change: Any) -> GlobalSteering:
        """As `SteeringRegistry.set`."""
        return await self._call(lambda registry: registry.set(**change))

    async def clear(self) -> GlobalSteering:
        """As `SteeringRegistry.clear`."""
        return await self._call(lambda registry: registry.clear())

    async def status(self, *, data: bool = False) -> GlobalSteering:
        """As `SteeringRegistry.status`."""
        return await self._call(lambda registry: registry.status(data=data))

    async def _call(self, method: Callable[[SteeringRegistry], T]) -> T:
        served = await ensure_engine_context(self._engine)
        if served is None:
            raise SteeringError("steering", NOT_ENABLED)
        return await asyncio.to_thread(method, served.registry)
