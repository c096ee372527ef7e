# SPDX-License-Identifier: Apache-2.0
"""Running of a controller for the samples of an engine client."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from vllm_steer import audit
from vllm_steer.capture.readout_stream import ReadoutStream
from vllm_steer.capture.readouts import Readouts
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.controllers import ControlledRequest, Controller
from vllm_steer.frontend.live import EndedRequestError, UnknownRequestError, live_sample, set_strength
from vllm_steer.frontend.sample_state import SampleState
from vllm_steer.limits import MAX_CONTROLLED
from vllm_steer.log import steering_logger
from vllm_steer.request.scalars import shown

logger = steering_logger(__name__)
_THREAD_PREFIX = "vllm-steer-controller-"
_MAX_CHARS = 300
"""Length of an error's text in a trace."""


class ControllerRunner:
    """Runs one controller for the samples of an ``AsyncLLM`` that have both readouts and live strengths.

    Every sample has a thread, so that a controller that hangs or fails affects its own sample only. That sample goes on
    with the strengths that it has, and its trace names the error of a controller that failed.

    Args:
        engine: The ``AsyncLLM``.
        offered: Class of the controller.
        options: Arguments of its constructor.
    """

    def __init__(self, engine: Any, offered: type[Controller], options: Mapping[str, Any]) -> None:
        self._engine = weakref.ref(engine)
        self._class, self._options = offered, dict(options)
        self._samples: dict[str, _Sample] = {}

    def check(self) -> None:
        """Raise SteeringError if no more samples can be controlled."""
        # A thread that hangs lives on after its sample.
        running = sum(thread.name.startswith(_THREAD_PREFIX) for thread in threading.enumerate())
        if running >= MAX_CONTROLLED:
            raise SteeringError("steering", f"{running} samples are being controlled, the most; try again later")

    def begin(self, state: Any, request: ControlledRequest, sample: SampleState) -> None:
        """Start to control a sample.

        Args:
            state: vLLM's state of the sample.
            request: What the controller is told about it.
            sample: The state of its readouts.
        """
        try:
            controller = self._class(**self._options)
        except Exception as error:
            logger.exception("The controller %s cannot be created", self._class.name)
            sample.controller_error = _problem(self._class.name, "cannot be created", error)
            return
        if (earlier := self._samples.pop(state.request_id, None)) is not None:
            earlier.end()  # it was aborted since the last step, and this sample has its id
        self._samples[state.request_id] = _Sample(controller, request, state, sample, self, asyncio.get_running_loop())

    def feed(self, request_states: Mapping[str, Any]) -> None:
        """Pass new readouts to the controllers; call after the outputs of a step have been processed."""
        for request_id, sample in list(self._samples.items()):
            if request_states.get(request_id) is not sample.state:
                del self._samples[request_id]
                sample.end()
            else:
                sample.feed()

    async def apply(self, sample: _Sample, strengths: Mapping[str, float]) -> None:
        """Set the strengths that a controller has returned."""
        engine, request = self._engine(), sample.request
        if engine is None:
            return
        try:
            await set_strength(engine, request.request_id, [live_sample(sample.state)], strengths)
        except (EndedRequestError, UnknownRequestError):
            return
        if not sample.changed:
            sample.changed = True
            with audit.attribute_to(f"controller:{self._class.name}"):
                audit.record_strengths(request.request_id, strengths)


class _Sample:
    """A sample, its controller and the controller's thread."""

    def __init__(
        self,
        controller: Controller,
        request: ControlledRequest,
        state: Any,
        sample: SampleState,
        runner: ControllerRunner,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        capture = sample.capture
        if capture is None or capture.readouts is None:
            raise ValueError("the request has no readouts")
        self.request, self.state, self.changed, self._ended = request, state, False, False
        self.pending: queue.SimpleQueue[Mapping[str, Readouts] | None] = queue.SimpleQueue()
        self._controller, self._sample, self._runner, self._loop = controller, sample, runner, loop
        self._receiver = capture.receiver
        self._stream = ReadoutStream(capture.readouts.program, capture.assembler, state.prompt_len)
        # A daemon, so that a controller that hangs does not keep the process from ending.
        threading.Thread(target=self._run, name=f"{_THREAD_PREFIX}{request.request_id[:40]}", daemon=True).start()

    def feed(self) -> None:
        """Queue the values of tokens that have been confirmed since the last call."""
        self._receiver.flush(self.state.request_id)
        values = self._stream.next_delta(self._sample.num_forwarded(self.state))
        if any(len(each.positions) for each in values.values()):
            self.pending.put(values)

    def end(self) -> None:
        """Drop the values that wait and end the thread."""
        self._ended = True
        self.pending.put(None)

    def _run(self) -> None:
        while (values := self.pending.get()) is not None and not self._ended:
            try:
                answer = self._controller.on_readouts(
                    self.request,
                    {name: each.positions for name, each in values.items()},
                    {name: each.values for name, each in values.items()},
                )
                if answer is None:
                    continue
                if not isinstance(answer, Mapping) or not all(isinstance(name, str) for name in answer):
                    raise TypeError(f"on_readouts returned {shown(answer)}, not a dict of strengths or None")
                # Checks names and numbers, and waits for the engine: one change at a time.
                asyncio.run_coroutine_threadsafe(self._runner.apply(self, answer), self._loop).result()
            except Exception as error:
                self._sample.controller_error = _problem(self._controller.name, "has failed", error)
                logger.exception(
                    "The controller %s of request %s has failed; the request goes on with its strengths",
                    self._controller.name,
                    self.request.request_id,
                )
                return


def _problem(name: str, what: str, error: Exception) -> str:
    """Return the text for a trace, which clients see.

    A `SteeringError` is about the names and limits of the request's own strengths. The text of any other exception may
    contain what only the server's log should: paths, addresses, keys.
    """
    if isinstance(error, SteeringError):
        return f"the controller {name} {what}: {error}"[:_MAX_CHARS]
    return f"the controller {name} {what}: {type(error).__name__}; the server's log has the details"
