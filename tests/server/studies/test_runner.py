# SPDX-License-Identifier: Apache-2.0
"""Requests of a study among those of other clients."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.registry.modules import registry
from tests.server.fakes import HIDDEN, MAX_MODEL_LEN, engine_context, vector
from vllm_steer import Edit, SteeringError
from vllm_steer.frontend.context import EngineContext
from vllm_steer.frontend.requests import complete_params_async
from vllm_steer.params import program_of
from vllm_steer.patching.runner import Score, ScoreRequest
from vllm_steer.server.studies.job import StudyJob
from vllm_steer.server.studies.runner import FCFS_CONCURRENCY, PRIORITY, EngineRunner, StudyCancelledError

REQUESTS = [ScoreRequest((1, 2, number), wanted=(7,)) for number in range(3 * FCFS_CONCURRENCY)]


class Engine:
    """Engine that holds each request until all that may run at one time have arrived."""

    def __init__(self, policy: str) -> None:
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(policy=policy))
        self.running = self.most = self.aborted = 0
        self.priorities: set[int] = set()
        self.stuck = False

    async def generate(self, prompt: Any, params: Any, request_id: str, *, priority: int) -> AsyncIterator[Any]:
        self.priorities.add(priority)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await (asyncio.Event().wait() if self.stuck else asyncio.sleep(0.05))
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        logprobs = [{7: SimpleNamespace(logprob=-float(prompt["prompt_token_ids"][2]))}]
        sample = SimpleNamespace(finish_reason="length", stop_reason=None, logprobs=logprobs)
        yield SimpleNamespace(finished=True, outputs=[sample], num_cached_tokens=0)


def runner_of(engine: Engine) -> EngineRunner:
    return EngineRunner(engine, engine_context(), asyncio.get_running_loop(), lambda runs, size: None)


async def scores_of(engine: Engine) -> list[Score]:
    return await asyncio.to_thread(runner_of(engine).score, REQUESTS)


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_cells_run_behind_other_requests(policy: str) -> None:
    """Catches cells that run ahead of other requests, or that fill a scheduler without priorities."""
    engine = Engine(policy)
    scores = asyncio.run(scores_of(engine))
    assert [score.logprobs[7] for score in scores] == [-float(number) for number in range(len(REQUESTS))]
    if policy == "priority":
        assert engine.priorities == {PRIORITY} and PRIORITY > 0
        assert engine.most > FCFS_CONCURRENCY
    else:
        assert engine.priorities == {0} and engine.most <= FCFS_CONCURRENCY


def test_one_thread_at_a_time_compiles_cells() -> None:
    """Catches cells whose threads hold up the event loop: it waits for each of them after every system call."""
    running, most = threading.Semaphore(0), []

    class Runner(EngineRunner):
        def _score_params(self, request: ScoreRequest) -> Any:
            running.release()
            time.sleep(0.002)  # lets another thread begin
            most.append(running._value)
            running.acquire()
            return super()._score_params(request)

    async def run() -> list[Score]:
        runner = Runner(Engine("fcfs"), engine_context(), asyncio.get_running_loop(), lambda runs, size: None)
        return await asyncio.to_thread(runner.score, REQUESTS)

    assert len(asyncio.run(run())) == len(most) == len(REQUESTS) and max(most) == 1


def test_cells_keep_the_limit_of_the_norm() -> None:
    """Catches a study whose edits may add more than those of other requests, and a cell that is refused below it."""
    rows = np.eye(2, HIDDEN, dtype=np.float32) * 3

    def request(strength: float) -> ScoreRequest:
        edit = Edit(kind="replace", point="post_block", layers=1, vector=rows, tokens=[0, 1], strength=strength)
        return ScoreRequest((1, 2, 3), (edit,), (7,))

    async def run() -> None:
        context = replace(engine_context(), registry=registry(max_norm=4))
        runner = EngineRunner(Engine("fcfs"), context, asyncio.get_running_loop(), lambda runs, size: None)
        fits, exceeds = await asyncio.to_thread(runner.score, [request(1.0), request(2.0)])
        assert fits.error is None and "may add a norm of 6; this server allows 4" in str(exceeds.error)
        with pytest.raises(SteeringError, match="this server allows 4"):
            await asyncio.to_thread(runner.capture, (1, 2, 3), {"post_block": [1]}, request(2.0).edits)

    asyncio.run(run())


class SteeredEngine(Engine):
    """Engine that records the number of edits of each request, and sets global steering after its first one."""

    def __init__(self, context: EngineContext) -> None:
        super().__init__("fcfs")
        self._context, self.edits = context, list[int]()

    async def generate(self, prompt: Any, params: Any, request_id: str, *, priority: int) -> AsyncIterator[Any]:
        program = program_of(await complete_params_async(self, params))
        self.edits.append(0 if program is None else len(program.edits))
        self._context.registry.set(base={"post_block": {len(self.edits): vector()}})
        async for output in super().generate(prompt, params, request_id, priority=priority):
            yield output

    @property
    def input_processor(self) -> Any:
        return SimpleNamespace(_steering_context=self._context)


@pytest.mark.parametrize("steered_before", [False, True])
def test_global_steering_changed_during_a_study_has_no_effect_on_it(steered_before: bool) -> None:
    """Catches cells that run under another global steering than the baselines with which they are compared."""

    async def run() -> list[int]:
        context = engine_context()
        if steered_before:
            context.registry.set(base={"post_block": {0: vector()}})
        engine = SteeredEngine(context)
        runner = EngineRunner(engine, context, asyncio.get_running_loop(), lambda runs, size: None)
        edit = Edit(kind="add", point="post_block", layers=1, vector=vector())
        for edits in ((), (edit,)):
            (score,) = await asyncio.to_thread(runner.score, [ScoreRequest((1, 2, 3), edits, (7,))])
            assert score.error is None
        return engine.edits

    assert asyncio.run(run()) == [steered_before, steered_before + 1]


def test_requests_of_a_cancelled_study_are_aborted() -> None:
    """Catches a cancelled study that leaves requests in the engine, or that sends further ones."""

    async def run() -> tuple[Engine, list[BaseException]]:
        engine, raised = Engine("priority"), list[BaseException]()
        engine.stuck = True
        runner = runner_of(engine)

        def work() -> None:
            for _ in range(2):
                try:
                    runner.score(REQUESTS)
                except StudyCancelledError as error:
                    raised.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        while engine.running < len(REQUESTS):
            await asyncio.sleep(0.01)
        runner.cancel()
        await asyncio.to_thread(thread.join)
        return engine, raised

    engine, raised = asyncio.run(run())
    assert engine.aborted == len(REQUESTS) and engine.running == 0 and len(raised) == 2


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "processed_logprobs"])
def test_studies_on_other_scores_are_refused(mode: str) -> None:
    """Catches a study that takes logits, or scores that other requests of the batch change, for log-probabilities."""

    async def facts_of(mode: str) -> Any:
        engine = Engine("fcfs")
        engine.vllm_config.model_config = SimpleNamespace(
            logprobs_mode=mode, logits_processors=None, get_vocab_size=lambda: 16, max_logprobs=20
        )
        return runner_of(engine).facts

    assert asyncio.run(facts_of("raw_logprobs")).vocab_size == 16
    with pytest.raises(SteeringError, match=f"logprobs_mode: is '{mode}'"):
        asyncio.run(facts_of(mode))


class Tokenizer:
    max_chars_per_token = 4

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.texts.append(text)
        return [1]


def test_the_length_of_a_text_is_checked_before_it_is_tokenised() -> None:
    """Catches a text of megabytes that is tokenised although no prompt can have it."""

    async def run() -> None:
        runner, tokenizer = runner_of(Engine("fcfs")), Tokenizer()
        runner.__dict__["tokenizer"] = tokenizer
        assert runner.encode("x" * 4 * MAX_MODEL_LEN, True) == [1]
        with pytest.raises(SteeringError, match="has 257 characters"):
            runner.encode("x" * (4 * MAX_MODEL_LEN + 1), True)
        runner.cancel()
        with pytest.raises(StudyCancelledError):  # between the prompts of a study whose client has left
            runner.encode("x", True)
        assert len(tokenizer.texts) == 1

    asyncio.run(run())


def test_a_study_keeps_its_place_until_its_thread_has_ended() -> None:
    """Catches more threads than studies are allowed, when clients leave."""

    async def run() -> None:
        ended, go_on = asyncio.Event(), threading.Event()

        def start(_: EngineRunner) -> Any:
            go_on.wait()
            yield from ()

        job = StudyJob(runner_of(Engine("fcfs")), start, lambda *_: iter(()), ended.set)
        job.start()
        job.cancel()
        await asyncio.sleep(0.05)
        assert not ended.is_set()
        go_on.set()
        await asyncio.wait_for(ended.wait(), 30)

    asyncio.run(run())
