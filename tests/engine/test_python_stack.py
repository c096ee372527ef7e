# SPDX-License-Identifier: Apache-2.0
"""Room for the Python frames of a step: ``vllm_steer.engine.python_stack``."""

from __future__ import annotations

import inspect
import resource
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor
import vllm.v1.executor.ray_executor_v2

from vllm_steer.compat.stages import BUSY_LOOPS
from vllm_steer.compat.wraps import Join, load
from vllm_steer.engine import scheduler
from vllm_steer.engine.python_stack import run_loop

CALLS = 100
IN_THREADS = {"async_output_busy_loop"}
"""Busy loops beside the steps, which only copy outputs."""


def _callee() -> None: ...


def _call_often() -> None:
    for _ in range(CALLS):
        _callee()


def _with_frame(slots: int) -> Callable[..., Any]:
    """Return a function that calls its argument and whose frame has a stack of ``slots`` slots."""

    def call(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    call.__code__ = call.__code__.replace(co_stacksize=slots)
    return call


def _page_faults(call: Callable[..., Any], *args: Any) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    call(*args)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_calls_of_a_step_do_not_cross_the_end_of_a_chunk() -> None:
    """Catches a frame of ``run_loop`` that leaves too little room in its chunk."""
    frames = [_with_frame(slots) for slots in range(8, 2_108)]
    crossing = [frame for frame in frames if _page_faults(frame, _call_often) >= CALLS]
    assert crossing, "CPython takes no chunk for a call anymore: python_stack is of no use"
    for frame in (*crossing, _with_frame(30_000)):
        assert run_loop(_page_faults, frame, _call_often) < CALLS


def _busy_loops() -> set[str]:
    """Return the busy loops of vLLM's engine and worker processes, by ``module:Class.method``."""
    found = set()
    for module in (vllm.v1.engine.core, vllm.v1.executor.multiproc_executor, vllm.v1.executor.ray_executor_v2):
        for _, owner in inspect.getmembers(module, inspect.isclass):
            for name in vars(owner):
                if name.endswith("busy_loop") and name not in IN_THREADS:
                    found.add(f"{owner.__module__}:{owner.__name__}.{name}")
    return found


def test_every_busy_loop_is_wrapped() -> None:
    """Catches a busy loop that a release of vLLM adds."""
    assert _busy_loops() == {join.method for join in BUSY_LOOPS}


@pytest.mark.parametrize("join", BUSY_LOOPS, ids=lambda join: join.method.rpartition(":")[2])
def test_busy_loops_have_this_room(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a busy loop that runs outside, for example after a release of vLLM has renamed it."""
    seen = []

    def look(*_: Any, **__: Any) -> Any:
        frame: Any = sys._getframe()
        while frame:
            seen.append(frame.f_code)
            frame = frame.f_back
        raise SystemExit

    loop = load(join.method)
    make_scheduler_only(monkeypatch)
    process = SimpleNamespace(
        _handle_shutdown=look, _execute_worker_rpc=None, rpc_broadcast_mq=SimpleNamespace(dequeue=look)
    )
    with pytest.raises(SystemExit):
        load(join.method)(process)
    assert run_loop.__code__ in seen
    assert getattr(loop, "__wrapped__", loop).__code__ in seen[: seen.index(run_loop.__code__)]


def make_scheduler_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call ``make_scheduler``, which vLLM calls in each engine process, with a class in place of the schedulers."""
    monkeypatch.setattr(scheduler, "SteeringScheduler", lambda **_: None)
    scheduler.make_scheduler(vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False)))
