# SPDX-License-Identifier: Apache-2.0
"""The client for code that runs in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx

from vllm_steer.client import calls
from vllm_steer.client.answers import CaptureAnswer, Completion, Piece, Rows, error_of, piece_of
from vllm_steer.client.calls import Call
from vllm_steer.client.events import async_events
from vllm_steer.client.packing import jsonable
from vllm_steer.client.retry import NOT_ASKED, Retry
from vllm_steer.registry.schema import Deleted, GlobalSteering, ModuleInfo, ModuleList

T = TypeVar("T")


class AsyncClient:
    """As :class:`~vllm_steer.client.Client`, with every method to be awaited."""

    def __init__(
        self,
        url: str = "http://localhost:8000",
        *,
        api_key: str | None = None,
        model: str | None = None,
        retry: Retry = Retry(),  # noqa: B008 - immutable
        timeout: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Nothing is sent yet; the arguments are those of `Client`."""
        headers = calls.headers(api_key)
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, transport=transport)
        self._model = model
        self._retry = retry

    async def register(self, name: str, **content: Any) -> ModuleInfo:
        """Register a module; the arguments are those of `SteeringRegistry.register`."""
        return await self._run(calls.register(name, content))

    async def register_file(self, name: str, source: str | Path | bytes) -> ModuleInfo:
        """Register the module in a safetensors file of this machine, or in its bytes."""
        return await self._run(calls.register_file(name, source))

    async def list(self) -> ModuleList:
        """All modules."""
        return await self._run(calls.modules())

    async def get(self, reference: str, *, data: bool = False) -> ModuleInfo:
        """One module, with its vectors if ``data``."""
        return await self._run(calls.module(reference, data))

    async def delete(self, reference: str) -> Deleted:
        """Delete a module, or one version of it."""
        return await self._run(calls.delete(reference))

    async def set(self, **change: Any) -> GlobalSteering:
        """Set global steering; the arguments are those of `SteeringRegistry.set`."""
        return await self._run(calls.set_steering(change))

    async def clear(self) -> GlobalSteering:
        """Clear global steering."""
        return await self._run(calls.clear())

    async def status(self, *, data: bool = False) -> GlobalSteering:
        """What is applied to every request, with its vectors if ``data``."""
        return await self._run(calls.status(data))

    async def complete(self, prompt: Any, **fields: Any) -> Completion:
        """Complete a prompt; ``fields`` are those of the body, steering and capture included."""
        return await self._run(calls.complete(await self.model(), prompt, fields))

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Completion:
        """Answer a conversation; ``fields`` are those of the body, steering and capture included."""
        return await self._run(calls.chat(await self.model(), messages, fields))

    async def stream_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> AsyncIterator[Piece]:
        """As `chat`, piece by piece."""
        body = {"model": await self.model(), "messages": [dict(each) for each in messages], **fields, "stream": True}
        sent = jsonable(body, "body")
        for attempt in count(1):
            outcome: httpx.Response | httpx.TransportError
            try:
                async with self._http.stream("POST", "/v1/chat/completions", json=sent) as outcome:
                    if outcome.is_success:
                        async for event in async_events(outcome.aiter_bytes()):
                            yield piece_of(event)
                        return
                    await outcome.aread()
            except NOT_ASKED as error:
                outcome = error
            wait = self._retry.wait(attempt, outcome, repeatable=False)
            if wait is None:
                raise outcome if isinstance(outcome, httpx.TransportError) else error_of(outcome)
            await asyncio.sleep(wait)

    async def fetch(self, capture: CaptureAnswer | str) -> dict[tuple[str, int], Rows]:
        """The rows of a capture that were too large for its answer, by point and layer."""
        return await self._run(calls.fetch(capture))

    async def model(self) -> str:
        """The model that requests name."""
        if self._model is None:
            self._model = await self._run(calls.served_models())
        return self._model

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, call: Call[T]) -> T:
        attempt = 0
        while True:
            attempt += 1
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = await self._http.request(**call.arguments())
            except httpx.TransportError as error:
                outcome = error
            wait = self._retry.wait(attempt, outcome, call.repeatable)
            if wait is not None:
                await asyncio.sleep(wait)
                continue
            if isinstance(outcome, httpx.TransportError):
                raise outcome
            if not outcome.is_success:
                raise error_of(outcome)
            return call.read(outcome)
