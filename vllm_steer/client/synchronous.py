# SPDX-License-Identifier: Apache-2.0
"""The client for ordinary code."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx

from vllm_steer.client import calls
from vllm_steer.client.answers import CaptureAnswer, Completion, Piece, Rows, error_of, piece_of
from vllm_steer.client.calls import Call
from vllm_steer.client.events import events
from vllm_steer.client.packing import jsonable
from vllm_steer.client.retry import NOT_ASKED, Retry
from vllm_steer.registry.schema import Deleted, GlobalSteering, ModuleInfo, ModuleList

T = TypeVar("T")


class Client:
    """A server's modules, global steering, completions and captures.

    Vectors may be lists, numpy arrays and torch tensors; arrays travel packed. All methods raise
    :class:`~vllm_steer.client.ServerError` for what the server refuses, and ``httpx.TransportError`` where it cannot be
    reached. A request that the server puts off (429, 503), or that a connection has lost and that can be made twice, is
    made again as ``retry`` says.
    """

    def __init__(
        self,
        url: str = "http://localhost:8000",
        *,
        api_key: str | None = None,
        model: str | None = None,
        retry: Retry = Retry(),  # noqa: B008 - immutable
        timeout: float = 600.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Nothing is sent yet.

        Args:
            url: of the server, without ``/v1``.
            api_key: sent as a bearer token.
            model: what requests name; by default the first that the server says it has.
            retry: how often and when requests are made again.
            timeout: seconds that a connection may be silent.
            transport: in place of httpx's own.
        """
        self._http = httpx.Client(base_url=url, headers=calls.headers(api_key), timeout=timeout, transport=transport)
        self._model = model
        self._retry = retry

    def register(self, name: str, **content: Any) -> ModuleInfo:
        """Register a module; the arguments are those of `SteeringRegistry.register`."""
        return self._run(calls.register(name, content))

    def register_file(self, name: str, source: str | Path | bytes) -> ModuleInfo:
        """Register the module in a safetensors file of this machine, or in its bytes."""
        return self._run(calls.register_file(name, source))

    def list(self) -> ModuleList:
        """All modules."""
        return self._run(calls.modules())

    def get(self, reference: str, *, data: bool = False) -> ModuleInfo:
        """One module, with its vectors if ``data``."""
        return self._run(calls.module(reference, data))

    def delete(self, reference: str) -> Deleted:
        """Delete a module, or one version of it."""
        return self._run(calls.delete(reference))

    def set(self, **change: Any) -> GlobalSteering:
        """Set global steering; the arguments are those of `SteeringRegistry.set`."""
        return self._run(calls.set_steering(change))

    def clear(self) -> GlobalSteering:
        """Clear global steering."""
        return self._run(calls.clear())

    def status(self, *, data: bool = False) -> GlobalSteering:
        """What is applied to every request, with its vectors if ``data``."""
        return self._run(calls.status(data))

    def complete(self, prompt: Any, **fields: Any) -> Completion:
        """Complete a prompt; ``fields`` are those of the body, steering and capture included."""
        return self._run(calls.complete(self.model, prompt, fields))

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Completion:
        """Answer a conversation; ``fields`` are those of the body, steering and capture included."""
        return self._run(calls.chat(self.model, messages, fields))

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Iterator[Piece]:
        """As `chat`, piece by piece."""
        body = {"model": self.model, "messages": [dict(each) for each in messages], **fields, "stream": True}
        sent = jsonable(body, "body")
        for attempt in count(1):
            outcome: httpx.Response | httpx.TransportError
            try:
                with self._http.stream("POST", "/v1/chat/completions", json=sent) as outcome:
                    if outcome.is_success:
                        for event in events(outcome.iter_bytes()):
                            yield piece_of(event)
                        return
                    outcome.read()
            except NOT_ASKED as error:
                outcome = error
            wait = self._retry.wait(attempt, outcome, repeatable=False)
            if wait is None:
                raise outcome if isinstance(outcome, httpx.TransportError) else error_of(outcome)
            time.sleep(wait)

    def fetch(self, capture: CaptureAnswer | str) -> dict[tuple[str, int], Rows]:
        """The rows of a capture that were too large for its answer, by point and layer."""
        return self._run(calls.fetch(capture))

    @property
    def model(self) -> str:
        """The model that requests name."""
        if self._model is None:
            self._model = self._run(calls.served_models())
        return self._model

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, call: Call[T]) -> T:
        attempt = 0
        while True:
            attempt += 1
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = self._http.request(**call.arguments())
            except httpx.TransportError as error:
                outcome = error
            wait = self._retry.wait(attempt, outcome, call.repeatable)
            if wait is not None:
                time.sleep(wait)
                continue
            if isinstance(outcome, httpx.TransportError):
                raise outcome
            if not outcome.is_success:
                raise error_of(outcome)
            return call.read(outcome)
