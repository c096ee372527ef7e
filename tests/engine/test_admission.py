# SPDX-License-Identifier: Apache-2.0
"""The scheduler's books over random arrivals, steps, preemptions, aborts and time-outs, against a model of them.

The model is told what the scheduler sends to workers and nothing else. It keeps a worker's ledger, which must always
have room for what comes, and the order in which requests came.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.engine import scheduler_alone
from tests.tiny import direction
from vllm_steer.engine.admission import AdmissionController
from vllm_steer.params import program_bytes
from vllm_steer.program import Resolved, TableAllocator, resolve
from vllm_steer.program.program import Program

ROWS, INSTRUCTIONS, VECTORS, LAYERS, HIDDEN = 3, 40, 3, 4, 64
CAPTURE_ROWS = (1 << 20) // (4 * HIDDEN)
SIZES = {"max_rows": ROWS, "max_instructions": INSTRUCTIONS, "max_vectors": VECTORS, "capture_mib": 1}
TIMEOUT = 30
VECTOR = [direction(seed) for seed in range(6)]


def fields_of(seeds: list[int], captures: bool) -> dict[str, Any]:
    """Up to two vectors on different tokens: up to two rows; and, where it captures, 12 rows of every token."""
    names = ("prefill_steering_vectors", "decode_steering_vectors")
    fields: dict[str, Any] = {name: {"post_block": {1: VECTOR[s]}} for name, s in zip(names, seeds, strict=False)}
    if captures:
        everything = {"pre_attn": "all", "post_attn": "all", "post_block": "all"}
        fields["capture"] = {"memory": {"hooks": everything, "positions": "all"}}
    return fields


class Books(RuleBasedStateMachine):
    """A new scheduler for each run, all with one configuration."""

    vllm_config: Any
    operations = 0
    preempted = 0

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0
        self.scheduler = scheduler_alone.make(self.vllm_config, blocks=10)
        self.scheduler.steering_admission._now = lambda: self.clock
        self.names = 0
        self.live: dict[str, Resolved | None] = {}
        self.admitted: list[str] = []
        self.sent: dict[str, Resolved] = {}
        self.worker = TableAllocator(ROWS, INSTRUCTIONS, VECTORS)

    @rule(
        length=st.integers(1, 48), generated=st.integers(1, 80), captures=st.booleans(),
        seeds=st.lists(st.integers(0, 5), max_size=2),
    )  # fmt: skip
    def arrive(self, length: int, generated: int, captures: bool, seeds: list[int]) -> None:
        self.names += 1
        name = f"r{self.names}"
        request = scheduler_alone.request(name, list(range(length)), generated, **fields_of(seeds, captures))
        data = program_bytes(request.sampling_params)
        self.live[name] = None if data is None else resolve(Program.from_bytes(data), length, LAYERS)
        self.scheduler.add_request(request)
        self.count()

    @rule(steps=st.integers(1, 20))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            scheduled = self.scheduler.schedule()
            self.note_admissions()
            # In the order in which a worker does it: what ended gives its places back before anybody takes some.
            for name in scheduled.finished_req_ids:
                self.forget(name)
            Books.preempted += len(scheduled.preempted_req_ids or ())
            for new in scheduled.scheduled_new_reqs:
                resolved = self.live.get(new.req_id)
                if resolved is not None:
                    assert self.worker.fits(resolved.token_programs), "a worker has no room for what it is sent"
                    self.worker.acquire(resolved.token_programs)
                    self.sent[new.req_id] = resolved
            for output in scheduler_alone.answer(self.scheduler, scheduled):
                if output.finish_reason is not None:
                    self.live.pop(output.request_id, None)
        self.count()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        from vllm.v1.request import RequestStatus

        name = data.draw(st.sampled_from(sorted(self.live)))
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        del self.live[name]
        self.count()

    @rule(seconds=st.integers(1, TIMEOUT))
    def wait(self, seconds: int) -> None:
        self.clock += seconds
        self.count()

    def forget(self, name: str) -> None:
        resolved = self.sent.pop(name, None)
        if resolved is not None:
            self.worker.release(resolved.token_programs)

    def note_admissions(self) -> None:
        """Nobody who needs places gets them before one who came earlier and still waits for some."""
        books: AdmissionController = self.scheduler.steering_admission
        waiting = [name for name, resolved in self.live.items() if resolved is not None and not books.has(name)]
        for name, resolved in self.live.items():
            if resolved is None or name in self.admitted or not books.has(name):
                continue
            earlier = [other for other in waiting if int(other[1:]) < int(name[1:])]
            assert not earlier, f"{name} overtook {earlier}"
            self.admitted.append(name)

    @invariant()
    def books_are_those_of_the_requests_that_hold_places(self) -> None:
        books: AdmissionController = self.scheduler.steering_admission
        holding = [resolved for name, resolved in self.live.items() if resolved is not None and books.has(name)]
        rows = {row.digest: row for resolved in holding for row in resolved.token_programs}
        vectors = {vector for row in rows.values() for vector in row.vectors}
        count = sum(row.num_instructions for row in rows.values())
        assert books.ledger.in_use == (len(rows), count, len(vectors))
        assert books.captures_booked <= CAPTURE_ROWS

    @invariant()
    def whoever_runs_holds_places(self) -> None:
        books: AdmissionController = self.scheduler.steering_admission
        for request in self.scheduler.running:
            assert self.live[request.request_id] is None or books.has(request.request_id)

    def count(self) -> None:
        Books.operations += 1

    def teardown(self) -> None:
        """With no more arrivals and the clock standing still, everybody gets through."""
        for _ in range(100):
            self.go_on(20)
            if not self.live:
                break
        assert not self.live, f"{list(self.live)} wait for ever"
        self.go_on(2)
        books: AdmissionController = self.scheduler.steering_admission
        assert books.ledger.in_use == (0, 0, 0)
        assert books.captures_booked == books.num_waiting == 0
        assert self.worker.in_use == (0, 0, 0)
        assert self.scheduler.kv_cache_manager.usage == 0


@pytest.fixture(scope="module", autouse=True)
def _config(tiny_llama: Path) -> None:
    Books.vllm_config = scheduler_alone.config(tiny_llama, sequences=8, queue_timeout=TIMEOUT, **SIZES)


def search(examples: int) -> None:
    run_state_machine_as_test(
        Books,
        settings=settings(
            max_examples=examples, stateful_step_count=60, deadline=None, phases=(Phase.generate,), derandomize=True
        ),
    )


def test_books_are_exact_over_ten_thousand_operations() -> None:
    """Catches places that leak or are given twice, and requests that overtake one that waits."""
    Books.operations = Books.preempted = 0
    search(300)
    assert Books.operations > 10_000
    assert Books.preempted > 100


def test_what_the_model_is_too_short_for_is_not_booked() -> None:
    """Catches a capture that the front end lets in and the scheduler never does: a million tokens of a model of 128."""
    scheduler = scheduler_alone.make(Books.vllm_config, blocks=10)
    scheduler.add_request(scheduler_alone.request("r1", [1, 2, 3], 1_000_000, **fields_of([], captures=True)))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["r1"]
    assert scheduler.steering_admission.captures_booked == 12 * (scheduler_alone.MAX_LEN - 1)


def test_the_time_of_a_pause_is_nobodys_waiting() -> None:
    """Catches a request that is ended as soon as a paused engine goes on, for what it waited while nobody could run."""
    from vllm.v1.core.sched.interface import PauseState

    scheduler, clock = scheduler_alone.make(Books.vllm_config, blocks=10), [0.0]
    scheduler.steering_admission._now = lambda: clock[0]
    for name, seeds in (("r1", [0, 1]), ("r2", [2, 3])):
        scheduler.add_request(scheduler_alone.request(name, [1, 2, 3], 80, **fields_of(seeds, captures=False)))

    def ended_after(seconds: float) -> list[str]:
        clock[0] += seconds
        outputs = scheduler_alone.answer(scheduler, scheduler.schedule())
        return [output.request_id for output in outputs if output.finish_reason is not None]

    assert ended_after(0) == []
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert ended_after(10 * TIMEOUT) == []
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert ended_after(TIMEOUT - 1) == []
    assert ended_after(1) == ["r2"]


@pytest.mark.parametrize("protection", ["release", "begin_step", "admit"])
def test_the_model_sees_a_protection_that_is_gone(monkeypatch: pytest.MonkeyPatch, protection: str) -> None:
    """Negative control: places that are not given back, a step that never opens again, and a queue with overtaking."""
    original = AdmissionController.admit

    def overtaking(self: AdmissionController, *args: Any) -> bool:
        self._closed = False
        return original(self, *args)

    broken = {"release": lambda self, name: None, "begin_step": lambda self: None, "admit": overtaking}
    monkeypatch.setattr(AdmissionController, protection, broken[protection])
    with pytest.raises(AssertionError):
        search(200)
