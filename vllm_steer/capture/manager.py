# SPDX-License-Identifier: Apache-2.0
"""The front end's side of capture: what running requests have asked for, and handing it to consumers when they end.

A consumer works in a thread of its own, so a slow one delays nobody's tokens; what it reports is waited for where a
result is looked at, and nowhere before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from vllm_steer.capture.assembly import Assembly
from vllm_steer.capture.consumers import OWN_THREADS, Consumer, make_consumer
from vllm_steer.capture.results import CapturedRequest, CaptureResult
from vllm_steer.capture.server_wide import split_options
from vllm_steer.engine.capabilities import Capabilities
from vllm_steer.errors import SteeringError
from vllm_steer.log import steering_logger
from vllm_steer.metrics.consumers import ConsumerMetrics
from vllm_steer.params import Specs
from vllm_steer.program import compile_program
from vllm_steer.spec import CaptureSpec, NamedProjection, Projection

logger = steering_logger(__name__)


class CaptureResults(Mapping[str, CaptureResult]):
    """Each consumer's result by name. Looking one up waits for its consumer."""

    def __init__(self, futures: Mapping[str, Future[CaptureResult]]) -> None:
        self._futures = dict(futures)

    def __getitem__(self, name: str) -> CaptureResult:
        return self._futures[name].result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._futures)

    def __len__(self) -> int:
        return len(self._futures)

    @property
    def futures(self) -> Mapping[str, Future[CaptureResult]]:
        """The results by name, for those who must not block; they never hold an exception."""
        return self._futures

    def __repr__(self) -> str:
        states = {name: "done" if future.done() else "running" for name, future in self._futures.items()}
        return f"CaptureResults({states})"

    def __reduce__(self) -> tuple[Any, ...]:
        # vLLM's outputs can be copied and sent to other processes; a future can not.
        return _reported, (dict(self),)


def _reported(results: dict[str, CaptureResult]) -> CaptureResults:
    futures: dict[str, Future[CaptureResult]] = {name: Future() for name in results}
    for name, result in results.items():
        futures[name].set_result(result)
    return CaptureResults(futures)


class CaptureManager:
    """One per engine client; knows the consumers and the captures of the requests in flight."""

    def __init__(self, capabilities: Capabilities, model: str, options: Mapping[str, Mapping[str, Any]]) -> None:
        self._capabilities = capabilities
        self._model = model
        self._consumers: dict[str, Consumer] = {}
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._meters: dict[str, ConsumerMetrics] = {}
        self._closed = False
        self._may_start = threading.Event()
        self._may_start.set()
        self.server_wide: Specs = ()
        for name, given in {"memory": {}, **options}.items():
            own, specs = split_options(name, given)
            self.server_wide += specs
            self._consumers[name] = make_consumer(name, own)
            self._threads[name] = ThreadPoolExecutor(1, thread_name_prefix=f"{OWN_THREADS}{name}")
            self._meters[name] = ConsumerMetrics(model, name)

        capabilities.check(compile_program([], [spec for _, spec in self.server_wide]), None)
        self.check(self.server_wide)

    def check(self, specs: Specs) -> None:
        """Raise :class:`SteeringError` unless every consumer is there and takes its spec."""
        for name, spec in specs:
            consumer = self._consumers.get(name)
            if consumer is None:
                raise SteeringError(
                    f"capture.{name}", f"is not a consumer of this engine; it has {', '.join(sorted(self._consumers))}"
                )
            if isinstance(spec.reduce, NamedProjection):
                raise SteeringError(f"capture.{name}.reduce", "names probes, which only requests to an engine may do")
            if (
                isinstance(spec.reduce, Projection)
                and spec.reduce.directions.shape[1] != self._capabilities.hidden_size
            ):
                raise SteeringError(
                    f"capture.{name}.reduce.directions",
                    f"are {spec.reduce.directions.shape[1]} wide, but this model's hidden size is "
                    f"{self._capabilities.hidden_size}",
                )
            consumer.check(spec, f"capture.{name}")

    def begin(self) -> Assembly:
        """Start collecting for one sample of a request."""
        served = self._capabilities
        return Assembly(served.num_layers, served.hidden_size, getattr(torch, served.dtype))

    def finish(self, assembly: Assembly, specs: Specs, **about: Any) -> CaptureResults:
        """Hand a finished sample to its consumers; ``about`` are the fields of :class:`CapturedRequest` on the
        request."""
        return CaptureResults({name: self._submit(name, spec, assembly, about) for name, spec in specs})

    def _submit(self, name: str, spec: CaptureSpec, assembly: Assembly, about: dict[str, Any]) -> Future[CaptureResult]:
        try:
            result = self._threads[name].submit(self._deliver_measured, time.monotonic(), name, spec, assembly, about)
        except RuntimeError as error:  # closed: the process is ending
            late: Future[CaptureResult] = Future()
            late.set_result(CaptureResult("error", f"{name} is closed: {error}", None))
            return late
        self._meters[name].queued()
        return result

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """No consumer starts on another sample meanwhile: its thread would contend for the interpreter with the one
        that processes a step's outputs, in which many samples may end."""
        self._may_start.clear()
        try:
            yield
        finally:
            self._may_start.set()

    def _deliver_measured(self, queued: float, name: str, *args: Any) -> CaptureResult:
        self._may_start.wait()
        started = time.monotonic()
        result = self._deliver(name, *args)
        self._meters[name].reported(result.status, started - queued, time.monotonic() - started)
        return result

    def _deliver(self, name: str, spec: CaptureSpec, assembly: Assembly, about: dict[str, Any]) -> CaptureResult:
        """Runs in the consumer's thread: whatever goes wrong is this capture's status and nobody else's."""
        try:
            prompt, output = about["prompt_token_ids"], about["output_token_ids"]
            sites, missing = assembly.finish(spec, len(prompt), len(prompt) + len(output))
            captured = CapturedRequest(
                **about, model=self._model, spec=spec, sites=sites, status="partial" if missing else "ok", error=missing
            )
            return CaptureResult(captured.status, captured.error, self._consumers[name].accept(captured))
        except Exception as error:  # a consumer may be anybody's class, and raise anything
            return CaptureResult("error", f"{type(error).__name__}: {error}", None)

    def close(self) -> None:
        """Wait for what is running, then close every consumer; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for name, thread in self._threads.items():
            thread.shutdown(wait=True)
            try:
                self._consumers[name].close()
            except Exception:  # the others have files to complete
                logger.exception("Capture consumer %s did not close", name)

    def let_go(self) -> None:
        """As :meth:`close`, for the end of the engine: the garbage collector may find that in any thread, and one of a
        consumer's can wait neither for itself nor for a lock that it holds."""
        if threading.current_thread().name.startswith(OWN_THREADS):
            threading.Thread(target=self.close, name="captures-end").start()
        else:
            self.close()
