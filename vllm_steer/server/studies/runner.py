# SPDX-License-Identifier: Apache-2.0
"""Requests of a study through the server's engine client.

A study runs in a thread of its own; its requests run in the server's event loop. They have the lowest priority where
the scheduler has priorities (``--scheduling-policy priority``). First-come-first-served schedulers cannot put them
behind other requests, so that few of them are in flight at one time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import EngineContext
from vllm_steer.params import APPLIED_KEY, program_of
from vllm_steer.patching.offline import LocalRunner, read_score, score_params
from vllm_steer.patching.runner import MAX_SCORED, Score, ScoreRequest
from vllm_steer.program.magnitude import check_magnitude
from vllm_steer.registry.snapshot import Snapshot

T = TypeVar("T")

FCFS_CONCURRENCY = 16
"""Requests of one study in flight where the scheduler serves requests in their order."""
PRIORITY = 1 << 30
"""Priority of a study's requests; lower numbers run first, and other requests have 0 by default."""


class StudyCancelledError(Exception):
    """The client has gone, or the server stops."""


class EngineRunner(LocalRunner):
    """Runner of one study. All methods but `cancel` are for the study's thread."""

    shared = True
    reference_limit = f"with this server; start it with --max-logprobs {MAX_SCORED}"
    no_tokenizer = "is a text, but the server runs without a tokenizer; give token ids"

    def __init__(
        self, engine: Any, context: EngineContext, loop: asyncio.AbstractEventLoop, reserve: Callable[[int, int], None]
    ) -> None:
        """Create a runner.

        Args:
            engine: vLLM's ``AsyncLLM``.
            context: Its context.
            loop: The server's event loop.
            reserve: Reserves the number of runs and the bytes of captured rows of the study; called in the loop.
        """
        super().__init__(engine.vllm_config, context, lambda: engine.get_tokenizer())
        self._engine, self._loop, self._reserve = engine, loop, reserve
        self._cancelled = threading.Event()
        self._pending: concurrent.futures.Future[Any] | None = None
        self._snapshot: Snapshot | None = None
        self._by_priority = engine.vllm_config.scheduler_config.policy == "priority"

    def cancel(self) -> None:
        """Abort the requests in flight, and refuse further ones."""
        self._cancelled.set()
        if self._pending is not None:
            self._pending.cancel()

    def check(self) -> None:
        """Raise ``StudyCancelledError`` if the study was cancelled."""
        if self._cancelled.is_set():
            raise StudyCancelledError

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and wait for its result. Raises ``StudyCancelledError``."""
        if self._cancelled.is_set():
            coroutine.close()
            raise StudyCancelledError
        self._pending = pending = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        if self._cancelled.is_set():  # between the first check and this line
            pending.cancel()
        try:
            return pending.result()
        except concurrent.futures.CancelledError:
            raise StudyCancelledError from None
        finally:
            self._pending = None

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the tokens of a text; raise ``SteeringError`` for one that is too long for a prompt."""
        most = self.context.capabilities.max_model_len * int(getattr(self.tokenizer, "max_chars_per_token", 0))
        if 0 < most < len(text):
            raise SteeringError(
                "study", f"has {len(text)} characters; a prompt of max_model_len tokens has at most {most}"
            )
        return super().encode(text, special)

    def reserve(self, runs: int, row_bytes: int) -> None:
        """Reserve the study's resources; raises ``AccessError``."""

        async def reserve() -> None:
            self._reserve(runs, row_bytes)

        self.call(reserve())

    def complete(self, tokens: Sequence[int], params: Any) -> Any:
        """Run one request and return its output."""
        self._check_norm(params)
        return self.call(self._generate(tokens, params))

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Run requests together. A request that fails does not fail the others."""
        return self.call(self._score_all(requests))

    async def _score_all(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        slots = asyncio.Semaphore(len(requests) if self._by_priority else FCFS_CONCURRENCY)
        # One thread at a time: after each system call, the event loop waits for every thread that wants the GIL.
        compiling = asyncio.Lock()

        async def score(request: ScoreRequest) -> Score:
            async with slots:
                try:
                    async with compiling:
                        params = await asyncio.to_thread(self._score_params, request)
                    return read_score(await self._generate(request.tokens, params), request)
                except Exception as error:  # an engine raises errors of many classes
                    return request.failed(error)

        return list(await asyncio.gather(*map(score, requests)))

    def _score_params(self, request: ScoreRequest) -> Any:
        params = score_params(request)
        self._check_norm(params)
        return params

    def _check_norm(self, params: Any) -> None:
        """Raise ``SteeringError`` if an edit may add more than the server allows, as for other requests."""
        registry = self.context.registry
        if registry.max_norm and (program := program_of(params)) is not None:
            check_magnitude(program, registry.max_norm, streams_at=registry.streams_at)

    async def _generate(self, tokens: Sequence[int], params: Any) -> Any:
        prompt = {"prompt_token_ids": list(tokens)}
        params.extra_args = await self._with_global_steering(params.extra_args or {})
        priority = PRIORITY if self._by_priority else 0
        # Cancelling this coroutine aborts the request in the engine.
        outputs = self._engine.generate(prompt, params, f"patch-{uuid.uuid4().hex}", priority=priority)
        (output,) = [each async for each in outputs if each.finished]
        return output

    async def _with_global_steering(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``extra_args`` with the global steering of the study's start, since its runs are compared."""
        if self._snapshot is None:
            newest = await self.context.registry.refresh()
            self._snapshot = self._snapshot or newest  # another run of the study may have read it meanwhile
        # With `APPLIED_KEY`, the front end does not add the present global steering.
        return {APPLIED_KEY: b"", **self.context.registry.compose(extra, self._snapshot)}
