# SPDX-License-Identifier: Apache-2.0
"""One study in a thread of its own, whose messages arrive in the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec

from vllm_steer.compat.internals import VLLMValidationError
from vllm_steer.errors import SteeringError
from vllm_steer.log import steering_logger
from vllm_steer.patching.result import PatchingResult
from vllm_steer.patching.sweep import Batch
from vllm_steer.server.http.error_response import StudyFailedError
from vllm_steer.server.studies.runner import EngineRunner, StudyCancelledError

logger = steering_logger(__name__)

Results = Iterator[tuple[PatchingResult, Batch | None]]
_AHEAD = 256
"""Messages that may wait for a slow client before the study pauses."""


class StudyJob:
    """A running study. Leave the context to cancel it."""

    def __init__(
        self,
        runner: EngineRunner,
        start: Callable[[EngineRunner], Results],
        encode: Callable[[PatchingResult, Batch | None, bool], Iterator[bytes]],
        on_exit: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a job.

        Args:
            runner: The runner.
            start: Checks the study and returns its results as they come. Runs in the thread.
            encode: Returns the messages of the first result, of each batch, and with True at the end, of the sweep.
            on_exit: Called in the event loop when the thread has ended, which may be after the response.
        """
        self._loop, self._on_exit = asyncio.get_running_loop(), on_exit
        self._runner, self._start, self._encode = runner, start, encode
        self._messages: asyncio.Queue[bytes | SteeringError | None] = asyncio.Queue(_AHEAD)
        self.outcome = "cancelled"
        """``finished``, ``failed`` or ``cancelled``."""
        self.result: PatchingResult | None = None

    def start(self) -> None:
        """Start the thread, with the current API key."""
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._run,), name="vllm-steer-study", daemon=True).start()

    def cancel(self) -> None:
        """End the study and abort its requests. Has no effect on a study that has ended."""
        self._runner.cancel()

    async def messages(self) -> AsyncIterator[bytes]:
        """Return the messages of the study as they come. Raises the error that ended the study, if any."""
        while (message := await self._messages.get()) is not None:
            if isinstance(message, SteeringError):
                raise message
            yield message

    def _run(self) -> None:
        try:
            self._run_study()
        finally:
            with contextlib.suppress(RuntimeError):  # the server has ended
                self._loop.call_soon_threadsafe(self._on_exit)

    def _run_study(self) -> None:
        with contextlib.suppress(StudyCancelledError):
            try:
                for result, batch in self._start(self._runner):
                    self.result = result
                    self._send(self._encode(result, batch, False))
                if self.result is not None:
                    self._send(self._encode(self.result, None, True))
                self.outcome = "finished"
                self._runner.call(self._messages.put(None))
            except StudyCancelledError:
                raise
            except Exception as error:  # the request's task reports it
                self.outcome = "failed"
                self._runner.call(self._messages.put(_as_refusal(error)))

    def _send(self, messages: Iterator[bytes]) -> None:
        for message in messages:
            self._runner.call(self._messages.put(message))


def _as_refusal(error: Exception) -> SteeringError:
    """Return the error of the response."""
    if isinstance(error, SteeringError):
        return error
    if isinstance(error, (ValueError, VLLMValidationError)):  # vLLM refused a prompt, for example because of its length
        return SteeringError("study", f"the engine refused a run: {error}")
    if not isinstance(error, RuntimeError):
        logger.error("A patching study failed", exc_info=error)
    return StudyFailedError("study", f"failed: {str(error) or type(error).__name__}")


def encode_event(document: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (document["event"].encode(), msgspec.json.encode(document))
