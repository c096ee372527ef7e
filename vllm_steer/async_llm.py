# SPDX-License-Identifier: Apache-2.0
"""``AsyncLLM`` with the registry of modules and global steering."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from vllm.v1.engine.async_llm import AsyncLLM as VllmAsyncLLM

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import NOT_ENABLED, RegistryOptions, ensure_engine_context, set_registry
from vllm_steer.frontend.live import SET_STRENGTH_RPC, check_strengths, first_position
from vllm_steer.registry.registry import SteeringRegistry
from vllm_steer.registry.schema import Deleted, GlobalSteering, ModuleInfo, ModuleList
from vllm_steer.spec.references import Reference

T = TypeVar("T")


class AsyncLLM(VllmAsyncLLM):  # type: ignore[misc]
    """vLLM's ``AsyncLLM`` with :attr:`steering`.

    Create one with ``AsyncLLM.from_engine_args(AsyncEngineArgs(..., **vllm_steer.engine_kwargs()))``.

    Example:
        >>> from vllm import AsyncEngineArgs  # doctest: +SKIP
        >>> from vllm_steer import AsyncLLM, engine_kwargs  # doctest: +SKIP
        >>> llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model="demo/model", **engine_kwargs()))  # doctest: +SKIP
    """

    @property
    def steering(self) -> AsyncSteering:
        """Registry of this engine: named modules and global steering."""
        return AsyncSteering(self)

    async def set_strength(self, request_id: str, **strengths: float) -> int:
        """Set live strengths of a running request; names are those of ``Edit(live=...)``.

        Args:
            request_id: The request's id, as given to ``generate``.
            **strengths: New factors by name.

        Returns:
            The position from which on the strengths hold, for all samples of the request.

        Raises:
            SteeringError: The request is not running, has no such live strength, or a strength is not finite.
        """
        ids, checked = check_strengths(self.output_processor, request_id, strengths)
        return first_position(await self.collective_rpc(SET_STRENGTH_RPC, args=(ids, checked)))

    def keep_modules(self, folder: str | Path | None = None, modules: Mapping[str, str | Path] | None = None) -> None:
        """Set where modules are stored. Call this before any other method.

        Args:
            folder: Folder that stores modules and global steering; None keeps them in memory.
            modules: Paths of safetensors files to register as modules, by name.
        """
        set_registry(self, RegistryOptions.of(folder, modules))


class AsyncSteering:
    """Asynchronous methods of :class:`~vllm_steer.registry.registry.SteeringRegistry`, run in a thread."""

    def __init__(self, engine: VllmAsyncLLM) -> None:
        self._engine = engine

    async def register(self, name: str, **content: Any) -> ModuleInfo:
        """Run ``SteeringRegistry.register``."""
        return await self._call(lambda registry: registry.register(name, **content))

    async def register_file(self, name: str, source: str | Path | bytes) -> ModuleInfo:
        """Run ``SteeringRegistry.register_file``."""
        return await self._call(lambda registry: registry.register_file(name, source))

    async def list(self) -> ModuleList:
        """Run ``SteeringRegistry.list``."""
        return await self._call(lambda registry: registry.list())

    async def get(self, reference: str | Reference, *, data: bool = False) -> ModuleInfo:
        """Run ``SteeringRegistry.get``."""
        return await self._call(lambda registry: registry.get(reference, data=data))

    async def delete(self, reference: str | Reference) -> Deleted:
        """Run ``SteeringRegistry.delete``."""
        return await self._call(lambda registry: registry.delete(reference))

    async def set(self, **change: Any) -> GlobalSteering:
        """Run ``SteeringRegistry.set``."""
        return await self._call(lambda registry: registry.set(**change))

    async def clear(self) -> GlobalSteering:
        """Run ``SteeringRegistry.clear``."""
        return await self._call(lambda registry: registry.clear())

    async def status(self, *, data: bool = False) -> GlobalSteering:
        """Run ``SteeringRegistry.status``."""
        return await self._call(lambda registry: registry.status(data=data))

    async def _call(self, method: Callable[[SteeringRegistry], T]) -> T:
        context = await ensure_engine_context(self._engine)
        if context is None:
            raise SteeringError("steering", NOT_ENABLED)
        return await asyncio.to_thread(method, context.registry)
