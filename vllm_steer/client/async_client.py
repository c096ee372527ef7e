# SPDX-License-Identifier: Apache-2.0
"""Asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import httpx

from vllm_steer.client.endpoints import (
    CHAT,
    Endpoint,
    Retry,
    aiter_events,
    auth_headers,
    check_url,
    error_of,
    generation,
    served_model,
    streamed_study,
    study_result,
)
from vllm_steer.client.responses import Piece, parse_piece
from vllm_steer.client.sync_client import Client

if TYPE_CHECKING:
    from vllm_steer.client.patching import HttpRunner
    from vllm_steer.patching import PatchingResult

P = ParamSpec("P")
T = TypeVar("T")


class _Requests(Client):
    """A client whose methods return their requests instead of sending them."""

    def __init__(self) -> None:
        """Create a client without connections."""

    def _request(self, endpoint: Endpoint[T]) -> Any:
        return endpoint


_REQUESTS = _Requests()


def _sent(method: Callable[P, T]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Return the coroutine that sends the request of a method of `Client`."""

    async def send(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._request(cast("Endpoint[T]", method(*args, **kwargs)))

    update_wrapper(send, getattr(Client, method.__name__))
    return send


class AsyncClient:
    """Asynchronous counterpart of `Client`.

    Methods are coroutines, with the arguments and results of those of `Client`; `stream_chat` and `stream_patch` are
    asynchronous iterators.

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
        headers = auth_headers(api_key)
        self._http = httpx.AsyncClient(base_url=check_url(url), headers=headers, timeout=timeout, transport=transport)
        self._model = model
        self._retry = retry
        self._blocking: dict[str, Any] = {"api_key": api_key, "timeout": timeout}

    register = _sent(_REQUESTS.register)
    register_file = _sent(_REQUESTS.register_file)
    list = _sent(_REQUESTS.list)
    get = _sent(_REQUESTS.get)
    delete = _sent(_REQUESTS.delete)
    set = _sent(_REQUESTS.set)
    clear = _sent(_REQUESTS.clear)
    status = _sent(_REQUESTS.status)
    complete = _sent(_REQUESTS.complete)
    chat = _sent(_REQUESTS.chat)
    set_strength = _sent(_REQUESTS.set_strength)
    fetch = _sent(_REQUESTS.fetch)
    capabilities = _sent(_REQUESTS.capabilities)
    tokenize = _sent(_REQUESTS.tokenize)
    detokenize = _sent(_REQUESTS.detokenize)

    async def stream_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> AsyncIterator[Piece]:
        """Answer a conversation as a stream; the arguments are those of `chat`."""
        endpoint = generation(CHAT, {"messages": [*messages], **fields}, stream=True)
        async with aclosing(await self._send(endpoint, stream=True)) as response:
            async for event in aiter_events(response.aiter_bytes()):
                yield parse_piece(event)

    async def patch(self, **study: Any) -> PatchingResult:
        """Run a patching study on the server's engine; arguments and result are those of `Client.patch`."""
        # Studies are received as events, because connections without data are closed during long ones.
        async with aclosing(self.stream_patch(**{**study, "return_file": True})) as events:
            async for event in events:
                if event["event"] == "summary":
                    return study_result(event)
        raise RuntimeError("the server ended the study without a result")

    async def stream_patch(self, **study: Any) -> AsyncGenerator[Mapping[str, Any]]:
        """Run a patching study and yield its events; the arguments are those of `patch`."""
        async with aclosing(await self._send(streamed_study(study), stream=True)) as response:
            async for event in aiter_events(response.aiter_bytes()):
                if event["event"] == "error":
                    parse_piece(event)
                yield event

    def _patching_runner(self) -> HttpRunner:
        """Return the runner that `PatchingStudy` uses for this client, which has connections of its own."""
        from vllm_steer.client.patching import HttpRunner

        return HttpRunner(Client(str(self._http.base_url), model=self._model, retry=self._retry, **self._blocking))

    async def model(self) -> str:
        """Return the model that requests name."""
        if self._model is None:
            self._model = await self._request(served_model())
        return self._model

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _request(self, endpoint: Endpoint[T]) -> T:
        return endpoint.parse(await self._send(endpoint))

    async def _send(self, endpoint: Endpoint[Any], *, stream: bool = False) -> httpx.Response:
        """Send a request, with retries, until it succeeds or fails for good."""
        attempt, model = 0, await self.model() if endpoint.names_model else None
        while True:
            attempt += 1
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = await self._http.send(endpoint.request(self._http, model), stream=stream)
                if outcome.is_success:
                    return outcome
                await outcome.aread()
            except httpx.TransportError as error:
                outcome = error
            delay = self._retry.delay(attempt, outcome, endpoint.idempotent)
            if delay is None:
                raise error_of(outcome, self._http.base_url)
            await asyncio.sleep(delay)
