# SPDX-License-Identifier: Apache-2.0
"""Running a workload: requests come and go by the engine's steps, and what each returned is written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.outputs import ROW_RECEIVER
from vllm_steer.testing.fuzz.answers import Answer, Gathering
from vllm_steer.testing.fuzz.workload import MODULE, EditCase, Request, module_of, prompt_of, sampling_params

PATIENCE = 4000
"""Steps without any output after which an engine counts as stuck."""


@dataclass
class Run:
    """What an engine did with a workload. ``broken`` is a sentence about the engine as a whole, or None."""

    answers: dict[str, Answer] = field(default_factory=dict)
    preempted: int = 0
    steps: int = 0
    broken: str | None = None


def run(llm: Any, requests: Sequence[Request], hidden: int) -> Run:
    """Run ``requests`` through ``llm``, an engine in this process; nothing is raised for what goes wrong there."""
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    done = Run()
    with _counting(scheduler, done):
        try:
            _drive(llm, list(requests), hidden, done)
        except SteeringError:
            raise
        except Exception as error:  # whatever an engine raises is a finding
            done.broken = f"the engine raised {type(error).__name__}: {error}"
            return done
    if done.broken is None:
        done.broken = _leak(llm, scheduler)
    return done


def grown(requests: Sequence[Request], llm: Any, hidden: int) -> tuple[list[Request], Run]:
    """Run each request by itself and in order; those that grow on others' answers get their whole prompts."""
    whole: list[Request] = []
    done = Run()
    for request in requests:
        parent = done.answers.get(request.grows) if request.grows else None
        if parent is not None and request.keep:
            before = next(r for r in whole if r.name == request.grows)
            start = [*before.prompt, *parent.samples[0].tokens[: request.keep]]
            request = msgspec.structs.replace(request, prompt=[*start, *request.prompt], keep=0)
        whole.append(request)
        one = run(llm, [request.by_itself], hidden)
        done.answers.update(one.answers)
        done.broken = done.broken or one.broken
        if done.broken:
            break
    return whole, done


def _drive(llm: Any, waiting: list[Request], hidden: int, done: Run) -> None:
    engine = llm.llm_engine
    names = {request.name for request in waiting}
    streamed = {request.name for request in waiting if request.stream}
    gathering = Gathering()
    aborts: dict[str, int] = {}
    due = waiting[0].gap if waiting else 0
    quiet = 0
    in_force: Sequence[EditCase] = ()
    while waiting or engine.has_unfinished_requests():
        while waiting and done.steps >= due:
            i = next((i for i, r in enumerate(waiting) if r.grows not in names or r.grows in done.answers), None)
            if i is None:
                break
            request = waiting.pop(i)
            try:
                if request.globally != list(in_force):
                    in_force = request.globally
                    _steer_all(llm, in_force, hidden)
                if request.module:
                    llm.steering.register(MODULE, **module_of(request.edits, hidden))
                engine.add_request(request.name, prompt_of(request), sampling_params(request, hidden))
            except SteeringError as error:
                done.answers[request.name] = Answer(refused=str(error))
            else:
                if request.abort_after is not None:
                    aborts[request.name] = done.steps + request.abort_after
            due = done.steps + (waiting[0].gap if waiting else 0)
        outputs = engine.step() if engine.has_unfinished_requests() else []
        done.steps += 1
        quiet = 0 if outputs else quiet + 1
        for output in outputs:
            answer = gathering.take(output, output.request_id in streamed)
            if answer is not None:
                done.answers[output.request_id] = answer
        for name in [name for name, at in aborts.items() if at <= done.steps]:
            del aborts[name]
            if name not in done.answers:
                engine.abort_request([name])
                done.answers[name] = Answer(aborted=True)
        if quiet > PATIENCE:
            done.broken = f"no output in {PATIENCE} steps, with {len(names) - len(done.answers)} requests unfinished"
            return
    if in_force:
        _steer_all(llm, (), hidden)


def _steer_all(llm: Any, edits: Sequence[EditCase], hidden: int) -> None:
    """What every request gets from now on."""
    if edits:
        llm.steering.set(**module_of(edits, hidden), replace=True)
    else:
        llm.steering.clear()


def _leak(llm: Any, scheduler: Any) -> str | None:
    """What the engine still holds with no request in it."""
    ledger = getattr(scheduler, "steering_ledger", None)
    if ledger is None:
        return None
    if ledger.in_use != (0, 0, 0):
        return f"the scheduler's books are not empty at the end: {ledger.in_use} rows, instructions, vectors"
    if scheduler.steering_row_sender.num_bytes:
        return f"{scheduler.steering_row_sender.num_bytes} bytes of captured rows are left at the end"
    inbox = getattr(llm.llm_engine.output_processor, ROW_RECEIVER, None)
    if inbox is not None and inbox.num_bytes:
        return f"{inbox.num_bytes} bytes of captured rows are left in the front end at the end"
    held = scheduler.kv_cache_manager.usage
    return f"{100 * held:.0f} % of the key-value cache are held at the end" if held else None


class _counting:
    """Counts preemptions of one scheduler."""

    def __init__(self, scheduler: Any, done: Run) -> None:
        self.scheduler, self.done = scheduler, done

    def __enter__(self) -> None:
        original = self.scheduler._preempt_request

        def preempt(*args: Any, **kwargs: Any) -> Any:
            self.done.preempted += 1
            return original(*args, **kwargs)

        self.scheduler._preempt_request = preempt

    def __exit__(self, *_: object) -> None:
        del self.scheduler._preempt_request
