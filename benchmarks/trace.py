# SPDX-License-Identifier: Apache-2.0
"""The profiler (CUPTI, which sees into CUDA graphs), switched on and off inside an engine's worker."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
ONCE_A_STEP = "_gumbel_sample_kernel"
"""Kernel that vLLM's runner V2 launches once per step, also for greedy requests."""
_PROFILER_ATTRIBUTE = "_benchmarks_profiler"


def work_of(profiler: Any) -> list[dict[str, Any]]:
    """Return the kernels and copies that a stopped profiler recorded, sorted by stream and time (microseconds)."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return sorted((e for e in events if e.get("cat") in WORK), key=lambda e: (e["args"]["stream"], e["ts"]))


def begin(worker: Any) -> None:
    """Start the profiler. Call this in a worker."""
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA])
    profiler.start()
    setattr(worker, _PROFILER_ATTRIBUTE, (profiler, time.thread_time(), time.process_time()))


def end(worker: Any, first: int, last: int) -> dict[str, Any]:
    """Stop the profiler and return the summary of steps ``first`` to ``last``. Call this in a worker.

    The result also has the CPU seconds of the calling thread and of its process since :func:`begin`. If the worker runs
    in the engine's process, the calling thread is the engine's.
    """
    profiler, thread, process = getattr(worker, _PROFILER_ATTRIBUTE)
    host = {"thread seconds": time.thread_time() - thread, "process seconds": time.process_time() - process}
    profiler.stop()
    return {**host, **summary(work_of(profiler), first, last)}


def summary(work: list[dict[str, Any]], first: int, last: int) -> dict[str, Any]:
    """Return medians over the recorded steps ``first`` to ``last``, in milliseconds.

    A step lasts from one sampling kernel to the next. The main stream is the stream of the sampling kernel.

    Returns:
        ``step``: Duration of a step. ``busy``, ``idle``: Time in which the main stream ran work, and in which it ran
        none. ``others``: Time in which any other stream ran work. ``kernels``: Time per step by kernel name, over all
        streams. ``waits``: Idle time of the main stream per step, by the name of the kernel that ended it.
        ``periods``: Durations of all recorded steps.
    """
    main = next(e["args"]["stream"] for e in work if ONCE_A_STEP in e["name"])
    marks = [e["ts"] + e["dur"] for e in work if ONCE_A_STEP in e["name"]]
    steps = list(pairwise(marks))[first:last]
    own = [(e["ts"], e["ts"] + e["dur"]) for e in work if e["args"]["stream"] == main]
    others = sorted((e["ts"], e["ts"] + e["dur"]) for e in work if e["args"]["stream"] != main)
    busy = [_covered(own, *step) for step in steps]
    total: Counter[str] = Counter()
    for event in work:
        if steps[0][0] <= event["ts"] < steps[-1][1]:
            total[event["name"]] += event["dur"]
    waits: Counter[str] = Counter()
    reached = since = steps[0][0]
    for event in (e for e in work if e["args"]["stream"] == main and since <= e["ts"] < steps[-1][1]):
        waits[event["name"]] += max(0, event["ts"] - reached)
        reached = max(reached, event["ts"] + event["dur"])
    return {
        "steps": len(steps),
        "step": statistics.median(until - since for since, until in steps) / 1000,
        "busy": statistics.median(busy) / 1000,
        "idle": statistics.median(until - since - b for (since, until), b in zip(steps, busy, strict=True)) / 1000,
        "others": statistics.median(_covered(others, *step) for step in steps) / 1000,
        "periods": [round((until - since) / 1000, 3) for since, until in pairwise(marks)],
        "kernels": {name: spent / 1000 / len(steps) for name, spent in total.most_common()},
        "waits": {name: spent / 1000 / len(steps) for name, spent in waits.most_common()},
    }


def _covered(intervals: list[tuple[float, float]], since: float, until: float) -> float:
    """Return the time between ``since`` and ``until`` that sorted ``intervals`` cover."""
    covered, reached = 0.0, since
    for start, stop in intervals:
        start, stop = max(start, reached), min(stop, until)
        if stop > start:
            covered, reached = covered + stop - start, stop
    return covered
