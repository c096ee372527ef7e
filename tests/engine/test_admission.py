# SPDX-License-Identifier: Apache-2.0
"""Tests of admission over random arrivals, steps, preemptions, aborts and timeouts, against a model of it.

The model sees only what the scheduler sends to workers. It has the table allocator of a worker, which must always have
room, and the order in which requests arrived.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.engine import scheduler_harness
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
    """Return fields with up to two vectors on different tokens (two table rows), and 12 captured rows per token."""
    names = ("prefill_steering_vectors", "decode_steering_vectors")
    fields: dict[str, Any] = {name: {"post_block": {1: VECTOR[s]}} for name, s in zip(names, seeds, strict=False)}
    if captures:
        everything = {"pre_attn": "all", "post_attn": "all", "post_block": "all"}
        fields["capture"] = {"memory": {"hooks": everything, "positions": "all"}}
    return fields


class AdmissionMachine(RuleBasedStateMachine):
    """Random operations on a new scheduler."""

    vllm_config: Any
    operations = 0
    preempted = 0

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0
        self.scheduler = scheduler_harness.make(self.vllm_config, blocks=10)
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
        request = scheduler_harness.request(name, list(range(length)), generated, **fields_of(seeds, captures))
        data = program_bytes(request.sampling_params)
        self.live[name] = None if data is None else resolve(Program.from_bytes(data), length, LAYERS)
        self.scheduler.add_request(request)
        self.count()

    @rule(steps=st.integers(1, 20))
    def run_steps(self, steps: int) -> None:
        for _ in range(steps):
            scheduled = self.scheduler.schedule()
            self.check_order()
            # In a worker's order: requests that have ended release their room before new ones take it.
            for name in scheduled.finished_req_ids:
                self.release(name)
            AdmissionMachine.preempted += len(scheduled.preempted_req_ids or ())
            for new in scheduled.scheduled_new_reqs:
                resolved = self.live.get(new.req_id)
                if resolved is not None:
                    assert self.worker.fits(resolved.token_programs), (
                        "a worker has no room for a request that it was sent"
                    )
                    self.worker.acquire(resolved.token_programs)
                    self.sent[new.req_id] = resolved
            for output in scheduler_harness.finish_step(self.scheduler, scheduled):
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

    def release(self, name: str) -> None:
        resolved = self.sent.pop(name, None)
        if resolved is not None:
            self.worker.release(resolved.token_programs)

    def check_order(self) -> None:
        """Check that no request is admitted before an earlier one that still waits."""
        admission: AdmissionController = self.scheduler.steering_admission
        waiting = [
            name for name, resolved in self.live.items() if resolved is not None and not admission.is_admitted(name)
        ]
        for name, resolved in self.live.items():
            if resolved is None or name in self.admitted or not admission.is_admitted(name):
                continue
            earlier = [other for other in waiting if int(other[1:]) < int(name[1:])]
            assert not earlier, f"{name} overtook {earlier}"
            self.admitted.append(name)

    @invariant()
    def reserved_room_matches_the_admitted_requests(self) -> None:
        admission: AdmissionController = self.scheduler.steering_admission
        holding = [
            resolved for name, resolved in self.live.items() if resolved is not None and admission.is_admitted(name)
        ]
        rows = {row.digest: row for resolved in holding for row in resolved.token_programs}
        vectors = {vector for row in rows.values() for vector in row.vectors}
        count = sum(row.num_instructions for row in rows.values())
        assert admission.allocator.in_use == (len(rows), count, len(vectors), 0)
        assert admission.reserved_rows <= CAPTURE_ROWS

    @invariant()
    def running_requests_are_admitted(self) -> None:
        admission: AdmissionController = self.scheduler.steering_admission
        for request in self.scheduler.running:
            assert self.live[request.request_id] is None or admission.is_admitted(request.request_id)

    def count(self) -> None:
        AdmissionMachine.operations += 1

    def teardown(self) -> None:
        """Check that every request completes without new arrivals and timeouts."""
        for _ in range(100):
            self.run_steps(20)
            if not self.live:
                break
        assert not self.live, f"{list(self.live)} wait forever"
        self.run_steps(2)
        admission: AdmissionController = self.scheduler.steering_admission
        assert admission.allocator.in_use == (0, 0, 0, 0)
        assert admission.reserved_rows == 0 and not admission.is_busy
        assert self.worker.in_use == (0, 0, 0, 0)
        assert self.scheduler.kv_cache_manager.usage == 0


@pytest.fixture(scope="module", autouse=True)
def _config(tiny_llama: Path) -> None:
    AdmissionMachine.vllm_config = scheduler_harness.config(tiny_llama, sequences=8, queue_timeout=TIMEOUT, **SIZES)


def search(examples: int) -> None:
    run_state_machine_as_test(
        AdmissionMachine,
        settings=settings(
            max_examples=examples, stateful_step_count=60, deadline=None, phases=(Phase.generate,), derandomize=True
        ),
    )


def test_reservations_are_exact_over_ten_thousand_operations() -> None:
    """Catches room that leaks or is given twice, and requests that overtake a waiting one."""
    AdmissionMachine.operations = AdmissionMachine.preempted = 0
    search(170)
    assert AdmissionMachine.operations > 10_000
    assert AdmissionMachine.preempted > 100


def test_reserves_no_more_than_the_model_length() -> None:
    """Catches a reservation by ``max_tokens`` alone, with which a capture that the front end accepts never starts."""
    scheduler = scheduler_harness.make(AdmissionMachine.vllm_config, blocks=10)
    scheduler.add_request(scheduler_harness.request("r1", [1, 2, 3], 1_000_000, **fields_of([], captures=True)))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["r1"]
    assert scheduler.steering_admission.reserved_rows == 12 * (scheduler_harness.MAX_LEN - 1)


def test_a_pause_does_not_count_as_waiting() -> None:
    """Catches a request that times out as soon as a paused engine resumes."""
    from vllm.v1.core.sched.interface import PauseState

    scheduler, clock = scheduler_harness.make(AdmissionMachine.vllm_config, blocks=10), [0.0]
    scheduler.steering_admission._now = lambda: clock[0]
    for name, seeds in (("r1", [0, 1]), ("r2", [2, 3])):
        scheduler.add_request(scheduler_harness.request(name, [1, 2, 3], 80, **fields_of(seeds, captures=False)))

    def ended_after(seconds: float) -> list[str]:
        clock[0] += seconds
        outputs = scheduler_harness.finish_step(scheduler, scheduler.schedule())
        return [output.request_id for output in outputs if output.finish_reason is not None]

    assert ended_after(0) == []
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert ended_after(10 * TIMEOUT) == []
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert ended_after(TIMEOUT - 1) == []
    assert ended_after(1) == ["r2"]


@pytest.mark.parametrize("protection", ["release", "begin_step", "admit"])
def test_the_model_finds_a_missing_protection(monkeypatch: pytest.MonkeyPatch, protection: str) -> None:
    """Negative control: room that is not released, a step that stays closed, and a queue with overtaking."""
    original = AdmissionController.admit

    def overtaking(self: AdmissionController, *args: Any) -> bool:
        self._closed = False
        return original(self, *args)

    broken = {"release": lambda self, name: None, "begin_step": lambda self: None, "admit": overtaking}
    monkeypatch.setattr(AdmissionController, protection, broken[protection])
    with pytest.raises(AssertionError):
        search(200)
