# SPDX-License-Identifier: Apache-2.0
"""Front-end side of capture: the consumers of a front end, and the delivery of finished samples to them.

Each consumer runs in its own thread, so a slow consumer does not delay token output. Only accessing a result blocks
until its consumer has finished.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from vllm_steer.capture.consumers import BUILT_IN, THREAD_PREFIX, Consumer, how_to_add, make_consumer
from vllm_steer.capture.consumers.thread import ConsumerThread
from vllm_steer.capture.results import CapturedRequest, CaptureResult, CaptureResults, SubmittedRequest, finished
from vllm_steer.capture.row_assembler import RowAssembler
from vllm_steer.capture.server_wide import split_options
from vllm_steer.errors import SteeringError
from vllm_steer.log import LimitedLog, steering_logger
from vllm_steer.metrics.collectors import ConsumerMetrics
from vllm_steer.params import Specs
from vllm_steer.program import Program, compile_program
from vllm_steer.request import CaptureSpec, NamedProjection, Projection
from vllm_steer.request.scalars import closest

logger = steering_logger(__name__)
HUNG_SECONDS = 60.0
"""Time without a finished capture after which the shutdown gives up on a consumer."""


class CaptureCapabilities(Protocol):
    """The engine's capabilities (``vllm_steer.engine.capabilities``), as far as captures depend on them."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    def check(self, program: Program, prompt_len: int | None) -> None: ...


class CaptureManager:
    """Consumers and captures of one front end."""

    def __init__(self, capabilities: CaptureCapabilities, model: str, options: Mapping[str, Mapping[str, Any]]) -> None:
        """Start the consumers.

        Args:
            capabilities: What the engine can capture.
            model: Served model name, for captured requests and metrics.
            options: Options by consumer name; ``memory`` is always available.

        Raises:
            SteeringError: A consumer is unknown, its options are invalid, or the engine cannot serve a server-wide
                capture.
        """
        self._capabilities = capabilities
        self.model_name = model
        self._consumers: dict[str, Consumer] = {}
        self._threads: dict[str, ConsumerThread] = {}
        self._errors = LimitedLog(logger)
        self._meters: dict[str, ConsumerMetrics] = {}
        self._closed = False
        self._may_start = threading.Event()
        self._may_start.set()
        self._submissions = itertools.count()
        self.server_wide: Specs = ()
        try:
            for name, given in {"memory": {}, **options}.items():
                own, specs = split_options(name, given)
                self.server_wide += specs
                self._consumers[name] = make_consumer(name, own, "capture_consumers")
                self._threads[name] = ConsumerThread(f"{THREAD_PREFIX}{name}")
                self._meters[name] = ConsumerMetrics(model, name)
                self._start(name)
            capabilities.check(compile_program([], [spec for _, spec in self.server_wide]), None)
            self.check(self.server_wide)
        except BaseException:
            self.close()  # the names of runs are free for the next start
            raise

    def _start(self, name: str) -> None:
        try:
            self._consumers[name].start(self.model_name)
        except SteeringError as error:
            raise SteeringError(f"capture_consumers.{name}.{error.field}", error.problem) from error

    def check(self, specs: Specs) -> None:
        """Check that every named consumer exists and accepts its spec.

        Raises:
            SteeringError: A spec cannot be served.
        """
        for name, spec in specs:
            field = f"capture.{name}"
            consumer = self._consumers.get(name)
            if consumer is None:
                names = ", ".join(sorted(self._consumers))
                meant = closest(name, (*self._consumers, *BUILT_IN)) or name
                hint = f"did you mean {meant}?" if meant in self._consumers else f"add {how_to_add(meant)}"
                raise SteeringError(field, f"this engine was started without {name}; it has {names}; {hint}")
            if isinstance(spec.reduce, NamedProjection):
                raise SteeringError(f"{field}.reduce", "named probes are supported in requests only")
            if isinstance(spec.reduce, Projection):
                width, hidden_size = spec.reduce.directions.shape[1], self._capabilities.hidden_size
                if width != hidden_size:
                    raise SteeringError(
                        f"{field}.reduce.directions",
                        f"directions have {width} components, but the model's hidden size is {hidden_size}",
                    )
            consumer.check(spec, field)

    def new_assembler(self) -> RowAssembler:
        """Return an empty assembler for one sample of a request."""
        model = self._capabilities
        return RowAssembler(model.num_layers, model.hidden_size, getattr(torch, model.dtype))

    def next_submission(self) -> int:
        """Return the number of the next request that captures."""
        return next(self._submissions)

    def begin(self, specs: Specs, request_id: str, sample: int, submission: int) -> None:
        """Tell the consumers that a sample was submitted."""
        for name, spec in specs:
            if type(self._consumers[name]).begin is not Consumer.begin:
                with suppress(RuntimeError):  # the process is ending
                    self._threads[name].submit(
                        self._begin, name, SubmittedRequest(request_id, sample, submission, spec)
                    )

    def _begin(self, name: str, submitted: SubmittedRequest) -> None:
        self._may_start.wait()
        try:
            self._consumers[name].begin(submitted)
        except Exception as error:  # third-party consumers may raise anything
            logger.warning("Capture consumer %s did not note a submitted request: %s", name, error)

    def submit(
        self, assembler: RowAssembler, specs: Specs, *, last_forwarded: bool = False, **about: Any
    ) -> CaptureResults:
        """Submit a finished sample to its consumers.

        Args:
            assembler: The collected rows.
            specs: Capture specs by consumer name.
            last_forwarded: Whether the last token has a row, because its readout has ended the sample.
            about: Fields of `CapturedRequest` that describe the request.
        """
        submitted = assembler, last_forwarded, about
        return CaptureResults({name: self._submit(name, spec, *submitted) for name, spec in specs})

    def _submit(self, name: str, spec: CaptureSpec, *submitted: Any) -> Future[CaptureResult]:
        try:
            result = self._threads[name].submit(self._deliver_measured, time.monotonic(), name, spec, *submitted)
        except RuntimeError as error:  # the process is ending
            return finished(CaptureResult("error", f"{name} is closed: {error}", None))
        self._meters[name].queued()
        return result

    @contextmanager
    def pause_consumers(self) -> Iterator[None]:
        """Keep consumers from starting on another sample.

        Their threads would compete for the interpreter with the thread that processes a step's outputs, in which many
        samples may finish.
        """
        try:  # an interrupt after clear() and before `try` would pause them forever
            self._may_start.clear()
            yield
        finally:
            self._may_start.set()

    def _deliver_measured(self, queued: float, name: str, *args: Any) -> CaptureResult:
        self._may_start.wait()
        started = time.monotonic()
        result = self._deliver(name, *args)
        self._meters[name].reported(result.status, started - queued, time.monotonic() - started)
        return result

    def _deliver(
        self, name: str, spec: CaptureSpec, assembler: RowAssembler, last_forwarded: bool, about: dict[str, Any]
    ) -> CaptureResult:
        """Assemble the rows and run the consumer, in the consumer's thread. An exception only fails this capture.

        SystemExit would end the API server that waits for the result. A panic in Rust is not an ``Exception`` either.
        """
        try:
            prompt, output = about["prompt_token_ids"], about["output_token_ids"]
            num_tokens = len(prompt) + len(output) + last_forwarded
            sites, problem = assembler.assemble(spec, len(prompt), num_tokens)
            unreached = assembler.unreached(spec, len(prompt), num_tokens)
            captured = CapturedRequest(
                **about,
                model=self.model_name,
                spec=spec,
                sites=sites,
                status="partial" if problem else "ok",
                error=problem,
                unreached=unreached,
            )
            return CaptureResult(captured.status, captured.error, self._consumers[name].accept(captured), unreached)
        except BaseException as error:  # third-party consumers may raise anything
            self._errors.error(name, "Capture consumer %s failed: %s", name, error, exc_info=error)
            return CaptureResult("error", f"{type(error).__name__}: {error}", None)

    def close(self) -> None:
        """Wait for pending samples, then close every consumer. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for thread in self._threads.values():
            thread.close()
        for name, thread in self._threads.items():
            thread.finish(self._close_consumer, name)
        self.give_up_on_hung(HUNG_SECONDS)

    def _close_consumer(self, name: str) -> None:
        try:
            self._consumers[name].close()
        except Exception:  # the other consumers must still complete their files
            logger.exception("Capture consumer %s failed to close", name)

    def give_up_on_hung(self, seconds: float) -> None:
        """Wait for pending samples, and abandon pending samples of a consumer that finishes none within ``seconds``.

        Their results have the status ``error``. A consumer that hangs would otherwise keep the process from ending.
        """
        for name, thread in self._threads.items():
            if not thread.settle(seconds):
                problem = f"{name} has finished nothing for {seconds:g} s while the process was ending"
                lost = thread.abandon(CaptureResult("error", problem, None))
                logger.error("Capture consumer %s hangs: %d jobs were given up", name, lost)

    def close_from_finalizer(self) -> None:
        """Close when the engine is garbage-collected, which may happen in any thread.

        A consumer's own thread can wait neither for itself nor for a lock that it holds, so a new thread closes there.
        """
        if threading.current_thread().name.startswith(THREAD_PREFIX):
            threading.Thread(target=self.close, name="close-captures").start()
        else:
            self.close()
