# SPDX-License-Identifier: Apache-2.0
"""Run a workload: requests arrive and are aborted at given engine steps, and their answers are collected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.outputs import ROW_RECEIVER
from vllm_steer.metrics.definitions import TABLES
from vllm_steer.testing.fuzz.answers import Answer, AnswerCollector
from vllm_steer.testing.fuzz.workload import MODULE, Form, Request, module_of, prompt_of, sampling_params

MAX_STEPS_WITHOUT_OUTPUT = 4000
"""Steps without output after which the engine is considered stuck."""


@dataclass
class Run:
    """Answers of an engine to a workload. ``broken`` describes a failure of the engine itself, or is None."""

    answers: dict[str, Answer] = field(default_factory=dict)
    preempted: int = 0
    steps: int = 0
    broken: str | None = None


def run(llm: Any, requests: Sequence[Request], hidden: int) -> Run:
    """Run ``requests`` on the in-process engine ``llm``. Errors of the engine are returned, not raised."""
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    done = Run()
    with _count_preemptions(scheduler, done):
        try:
            _drive(llm, list(requests), hidden, done)
        except SteeringError:
            raise
        except Exception as error:  # any error of the engine is a finding
            done.broken = f"the engine raised {type(error).__name__}: {error}"
            return done
    if done.broken is None:
        done.broken = _find_leak(llm, scheduler)
    return done


def run_each_alone(requests: Sequence[Request], llm: Any, hidden: int) -> tuple[list[Request], Run]:
    """Run each request alone, in order, and resolve the prompts of requests that continue another one."""
    resolved: list[Request] = []
    done = Run()
    for request in requests:
        parent = done.answers.get(request.grows) if request.grows else None
        if parent is not None and request.keep:
            parent_request = next(r for r in resolved if r.name == request.grows)
            start = [*parent_request.prompt, *parent.samples[0].tokens[: request.keep]]
            request = msgspec.structs.replace(request, prompt=[*start, *request.prompt], keep=0)
        resolved.append(request)
        one = run(llm, [request.standalone], hidden)
        done.answers.update(one.answers)
        done.broken = done.broken or one.broken
        if done.broken:
            break
    return resolved, done


def _drive(llm: Any, waiting: list[Request], hidden: int, done: Run) -> None:
    engine = llm.llm_engine
    names = {request.name for request in waiting}
    streamed = {request.name for request in waiting if request.stream}
    collector = AnswerCollector()
    aborts: dict[str, int] = {}
    due = waiting[0].gap if waiting else 0
    silent_steps = 0
    in_force: Sequence[Form] = ()
    while waiting or engine.has_unfinished_requests():
        while waiting and done.steps >= due:
            i = next((i for i, r in enumerate(waiting) if r.grows not in names or r.grows in done.answers), None)
            if i is None:
                break
            request = waiting.pop(i)
            try:
                if request.globally != list(in_force):
                    in_force = request.globally
                    _set_global_steering(llm, in_force, hidden)
                if request.module:
                    llm.steering.register(MODULE, **module_of(request.edits, hidden))
                engine.add_request(request.name, prompt_of(request), sampling_params(request, hidden))
                if request.strengths:
                    llm.set_strength(request.name, **request.strengths)
            except SteeringError as error:
                done.answers[request.name] = Answer(refused=str(error))
            else:
                if request.abort_after is not None:
                    aborts[request.name] = done.steps + request.abort_after
            due = done.steps + (waiting[0].gap if waiting else 0)
        outputs = engine.step() if engine.has_unfinished_requests() else []
        done.steps += 1
        silent_steps = 0 if outputs else silent_steps + 1
        for output in outputs:
            answer = collector.add(output, output.request_id in streamed)
            if answer is not None:
                done.answers[output.request_id] = answer
        for name in [name for name, at in aborts.items() if at <= done.steps]:
            del aborts[name]
            if name not in done.answers:
                engine.abort_request([name])
                done.answers[name] = Answer(aborted=True)
        if silent_steps > MAX_STEPS_WITHOUT_OUTPUT:
            unfinished = len(names) - len(done.answers)
            done.broken = f"no output in {MAX_STEPS_WITHOUT_OUTPUT} steps, with {unfinished} requests unfinished"
            return
    if in_force:
        _set_global_steering(llm, (), hidden)


def _set_global_steering(llm: Any, edits: Sequence[Form], hidden: int) -> None:
    """Set the global steering for the requests that arrive from now on."""
    if edits:
        llm.steering.set(**module_of(edits, hidden), replace=True)
    else:
        llm.steering.clear()


def _find_leak(llm: Any, scheduler: Any) -> str | None:
    """Return a description of resources that the idle engine still holds, or None."""
    allocator = getattr(scheduler, "steering_allocator", None)
    if allocator is None:
        return None
    if any(allocator.in_use):
        in_use = ", ".join(f"{used} {table}" for table, used in zip(TABLES, allocator.in_use, strict=True))
        return f"the steering tables are not empty at the end: {in_use}"
    if scheduler.steering_row_sender.num_bytes:
        return f"{scheduler.steering_row_sender.num_bytes} bytes of captured rows remain in the scheduler at the end"
    receiver = getattr(llm.llm_engine.output_processor, ROW_RECEIVER, None)
    if receiver is not None and receiver.num_bytes:
        return f"{receiver.num_bytes} bytes of captured rows remain in the front end at the end"
    held = scheduler.kv_cache_manager.usage
    return f"{100 * held:.0f} % of the key-value cache is in use at the end" if held else None


@contextmanager
def _count_preemptions(scheduler: Any, done: Run) -> Iterator[None]:
    """Add the scheduler's preemptions to ``done.preempted``."""
    original = scheduler._preempt_request

    def preempt(*args: Any, **kwargs: Any) -> Any:
        done.preempted += 1
        return original(*args, **kwargs)

    scheduler._preempt_request = preempt
    try:
        yield
    finally:
        del scheduler._preempt_request
