# SPDX-License-Identifier: Apache-2.0
"""Asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import httpx

from vllm_steer.client import endpoints
from vllm_steer.client.endpoints import Endpoint
from vllm_steer.client.events import aiter_events
from vllm_steer.client.responses import CaptureAnswer, Completion, Piece, Rows, parse_error, parse_piece
from vllm_steer.client.retry import Retry
from vllm_steer.registry.schema import Deleted, GlobalSteering, LiveStrengths, ModuleInfo, ModuleList

if TYPE_CHECKING:
    from vllm_steer.client.patching import HttpRunner
    from vllm_steer.patching import PatchingResult

T = TypeVar("T")
Tokens: TypeAlias = list[int]  # the method `list` hides the type inside of the class


class AsyncClient:
    """Asynchronous counterpart of `Client`.

    Methods are coroutines; `stream_chat` is an asynchronous iterator.

    Examples:
        >>> from vllm_steer import AsyncClient  # doctest: +SKIP
        >>> client = AsyncClient("http://localhost:8000")  # doctest: +SKIP
    """

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
        """Create a client; the arguments are those of `Client`."""
        headers = endpoints.auth_headers(api_key)
        self._http = httpx.AsyncClient(
            base_url=endpoints.check_url(url), headers=headers, timeout=timeout, transport=transport
        )
        self._model = model
        self._retry = retry
        self._blocking: dict[str, Any] = {"api_key": api_key, "timeout": timeout}

    async def register(self, name: str, **content: Any) -> ModuleInfo:
        """Register a module; the arguments are those of `SteeringRegistry.register`."""
        return await self._request(endpoints.register(name, content))

    async def register_file(self, name: str, source: str | Path | bytes) -> ModuleInfo:
        """Register the module in a local file, also of another tool, given by its path or its bytes."""
        return await self._request(endpoints.register_file(name, source))

    async def list(self) -> ModuleList:
        """Return all modules."""
        return await self._request(endpoints.list_modules())

    async def get(self, reference: str, *, data: bool = False) -> ModuleInfo:
        """Return one module, including its vectors if ``data`` is set."""
        return await self._request(endpoints.get_module(reference, data))

    async def delete(self, reference: str) -> Deleted:
        """Delete a module, or one version of it."""
        return await self._request(endpoints.delete_module(reference))

    async def set(self, **change: Any) -> GlobalSteering:
        """Set global steering; the arguments are those of `SteeringRegistry.set`."""
        return await self._request(endpoints.set_steering(change))

    async def clear(self) -> GlobalSteering:
        """Clear global steering."""
        return await self._request(endpoints.clear_steering())

    async def status(self, *, data: bool = False) -> GlobalSteering:
        """Return the global steering, including its vectors if ``data`` is set."""
        return await self._request(endpoints.get_steering(data))

    async def complete(self, prompt: Any, **fields: Any) -> Completion:
        """Complete a prompt; ``fields`` are further fields of the body, such as steering and capture."""
        return await self._request(endpoints.complete(await self.model(), prompt, fields))

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Completion:
        """Answer a conversation; ``fields`` are further fields of the body, such as steering and capture."""
        return await self._request(endpoints.chat(await self.model(), messages, fields))

    async def stream_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> AsyncIterator[Piece]:
        """Answer a conversation as a stream; the arguments are those of `chat`."""
        endpoint = endpoints.stream_chat(await self.model(), messages, fields)
        async with aclosing(await self._send(endpoint, stream=True)) as response:
            async for event in aiter_events(response.aiter_bytes()):
                yield parse_piece(event)

    async def patch(self, **study: Any) -> PatchingResult:
        """Run a patching study on the server's engine.

        Args:
            **study: Arguments of `PatchingStudy` and of its method `sweep`, such as clean, corrupt, answer, foil and
                points. The metric is a name; ``file`` and ``progress`` are not accepted.

        Returns:
            The grids, as `PatchingStudy.sweep` returns them.
        """
        # Studies are received as events, because connections without data are closed during long ones.
        async with aclosing(self._stream_study({**study, "return_file": True})) as events:
            async for event in events:
                if event["event"] == "summary":
                    return endpoints.study_result(event)
        raise RuntimeError("the server ended the study without a result")

    async def stream_patch(self, **study: Any) -> AsyncIterator[Mapping[str, Any]]:
        """Run a patching study and yield its events; the arguments are those of `patch`."""
        async with aclosing(self._stream_study(study)) as events:
            async for event in events:
                yield event

    async def _stream_study(self, study: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any]]:
        async with aclosing(await self._send(endpoints.stream_patch(study), stream=True)) as response:
            async for event in aiter_events(response.aiter_bytes()):
                if event["event"] == "error":
                    parse_piece(event)
                yield event

    async def set_strength(self, request_id: str, **strengths: float) -> LiveStrengths:
        """Set live strengths of a running request; ``request_id`` is the ``id`` of its response or pieces."""
        return await self._request(endpoints.set_strength(request_id, strengths))

    async def fetch(self, capture: CaptureAnswer | str) -> dict[tuple[str, int], Rows]:
        """Return the rows of a capture that were too large for the response, by point and layer."""
        return await self._request(endpoints.fetch(capture))

    async def capabilities(self) -> dict[str, Any]:
        """Return what the server's engine supports, as ``GET /v1/steering/capabilities`` does."""
        return await self._request(endpoints.capabilities())

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> Tokens:
        """Return the tokens of a text."""
        return await self._request(endpoints.tokenize(await self.model(), text, add_special_tokens))

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return await self._request(endpoints.detokenize(await self.model(), tokens))

    def _patching_runner(self) -> HttpRunner:
        """Return the runner that `PatchingStudy` uses for this client, which has connections of its own."""
        from vllm_steer.client.patching import HttpRunner
        from vllm_steer.client.sync_client import Client

        client = Client(str(self._http.base_url), model=self._model, retry=self._retry, **self._blocking)
        return HttpRunner(client)

    async def model(self) -> str:
        """Return the model that requests name."""
        if self._model is None:
            self._model = await self._request(endpoints.served_model())
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

    async def _request(self, endpoint: Endpoint[T]) -> T:
        return endpoint.parse(await self._send(endpoint))

    async def _send(self, endpoint: Endpoint[Any], *, stream: bool = False) -> httpx.Response:
        """Send a request, with retries, until it succeeds or fails for good."""
        attempt = 0
        while True:
            attempt += 1
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = await self._http.send(endpoint.request(self._http), stream=stream)
                if outcome.is_success:
                    return outcome
                await outcome.aread()
            except httpx.TransportError as error:
                outcome = error
            delay = self._retry.delay(attempt, outcome, endpoint.idempotent)
            if delay is None:
                raise outcome if isinstance(outcome, httpx.TransportError) else parse_error(outcome)
            await asyncio.sleep(delay)
