# SPDX-License-Identifier: Apache-2.0
"""Responses of the routes that run studies: limits, a thread per study, and its end when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from vllm_steer import audit
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import EngineContext
from vllm_steer.metrics.collectors import add
from vllm_steer.patching.answer import cell_events, start_event
from vllm_steer.patching.result import PatchingResult
from vllm_steer.patching.sweep import Batch
from vllm_steer.server.http.error_response import error_status
from vllm_steer.server.http.result_waiter import wait_for_disconnect
from vllm_steer.server.quota.tracker import Reservation
from vllm_steer.server.routes.base import RESERVATION_KEY
from vllm_steer.server.studies.job import Results, StudyJob, encode_event
from vllm_steer.server.studies.runner import EngineRunner

T = TypeVar("T")


class StudyService:
    """Runs studies on one engine."""

    def __init__(self, engine: Any, context: EngineContext, names: Sequence[str] = ()) -> None:
        """Create a service.

        Args:
            engine: vLLM's ``AsyncLLM``.
            context: Its context.
            names: All names of the served model; by default the one that the engine has.
        """
        self._engine, self._context = engine, context
        self._names = names or (engine.vllm_config.model_config.served_model_name,)

    def check_model(self, name: object) -> None:
        """Raise ``SteeringError`` unless ``name`` is the served model; None counts as absent."""
        if name is not None and name not in self._names:
            raise SteeringError("model", f"{str(name)[:80]!r} is not served for studies; use {', '.join(self._names)}")

    async def respond(
        self,
        request: Request,
        start: Callable[[EngineRunner], Results],
        summarise: Callable[[PatchingResult], dict[str, Any]],
        *,
        stream: bool,
    ) -> Response:
        """Run a study and return its response.

        Args:
            request: The HTTP request, whose body has been read.
            start: Checks the study and returns its results; runs in the study's thread.
            summarise: Returns the answer for a finished result.
            stream: Whether to send events.

        Raises:
            SteeringError: The study is invalid, too large, or failed.
            ClientDisconnect: The client has gone; the study is cancelled.
        """
        reservation: Reservation | None = request.scope.get(RESERVATION_KEY)
        release = reservation.reserve_study() if reservation is not None else lambda: None

        def reserve(runs: int, row_bytes: int) -> None:
            if reservation is not None:
                reservation.check_study(runs, row_bytes)

        def encode(result: PatchingResult, batch: Batch | None, last: bool) -> Iterator[bytes]:
            if last:
                document = summarise(result)
                yield encode_event({"event": "summary", **document}) if stream else msgspec.json.encode(document)
            elif batch is None:
                yield encode_event(start_event(result)) if stream else b""
            elif stream:
                yield from map(encode_event, cell_events(result, batch))

        runner = EngineRunner(self._engine, self._context, asyncio.get_running_loop(), reserve)
        job = StudyJob(runner, start, encode, release)
        job.start()
        messages = job.messages()
        streaming = False
        try:
            first = await _unless_gone(request, anext(messages))
            if job.result is not None:
                audit.record_study(job.result.info.digest)
            if stream:
                streaming = True
                return _EventResponse(first, messages, lambda: self._end(job))
            return Response(await _unless_gone(request, _last(messages)), media_type="application/json")
        finally:
            if not streaming:
                self._end(job)

    def _end(self, job: StudyJob) -> None:
        job.cancel()
        model = self._context.model_name
        if job.result is not None or job.outcome == "cancelled":  # not one that was refused
            add("studies", model_name=model, outcome=job.outcome)
        if job.result is not None:
            done = int((~np.isnan(job.result.cells[..., 0])).sum())
            add("study_cells", done, model_name=model, outcome="ok")
            add("study_cells", len(job.result.errors), model_name=model, outcome="failed")


class _EventResponse(StreamingResponse):
    """Server-sent events of a study, which ends with the response."""

    def __init__(self, first: bytes, messages: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        super().__init__(_events(first, messages), media_type="text/event-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


async def _events(first: bytes, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    try:
        async for message in messages:
            yield message
    except SteeringError as error:
        status, kind = error_status(error)
        detail = {"message": str(error), "type": kind, "param": error.field, "code": status.value}
        yield encode_event({"event": "error", "error": detail})


async def _last(messages: AsyncIterator[bytes]) -> bytes:
    return [message async for message in messages][-1]


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Wait for ``work``. Raises ``ClientDisconnect`` as soon as the client leaves."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
