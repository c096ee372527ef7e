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
"""Of vLLM's runner V2, greedy requests included."""
_KEPT = "_benchmarks_profiler"


def work_of(profiler: Any) -> list[dict[str, Any]]:
    """Every kernel and copy that a stopped profiler has seen, by stream and time (microseconds)."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return sorted((e for e in events if e.get("cat") in WORK), key=lambda e: (e["args"]["stream"], e["ts"]))


def begin(worker: Any) -> None:
    """To be called in a worker: record what the GPU does from now on."""
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA])
    profiler.start()
    setattr(worker, _KEPT, (profiler, time.thread_time(), time.process_time()))


def end(worker: Any, first: int, last: int) -> dict[str, Any]:
    """To be called in a worker: what the GPU did in steps ``first`` to ``last`` (see :func:`summary`).

    Beside it the CPU seconds since :func:`begin`: of this thread, which is the engine's where the worker lives in its
    process, and of the process.
    """
    profiler, thread, process = getattr(worker, _KEPT)
    host = {"thread seconds": time.thread_time() - thread, "process seconds": time.process_time() - process}
    profiler.stop()
    return {**host, **summary(work_of(profiler), first, last)}


def summary(work: list[dict[str, Any]], first: int, last: int) -> dict[str, Any]:
    """Milliseconds of a step, from one sampling to the next: median over steps ``first`` to ``last`` of all
    that were recorded.

    ``main`` is the stream that samples: how long it was busy and how long it had nothing to do; ``others`` how long any
    of the other streams was busy. ``kernels`` are the milliseconds per step of each name, on all streams; ``waits``
    those that the main stream had nothing to do for, by the name of what came next.
    """
    main = next(e["args"]["stream"] for e in work if ONCE_A_STEP in e["name"])
    marks = [e["ts"] + e["dur"] for e in work if ONCE_A_STEP in e["name"]]
    kept = list(pairwise(marks))[first:last]
    own = [(e["ts"], e["ts"] + e["dur"]) for e in work if e["args"]["stream"] == main]
    others = sorted((e["ts"], e["ts"] + e["dur"]) for e in work if e["args"]["stream"] != main)
    busy = [_covered(own, *step) for step in kept]
    total: Counter[str] = Counter()
    for event in work:
        if kept[0][0] <= event["ts"] < kept[-1][1]:
            total[event["name"]] += event["dur"]
    waits: Counter[str] = Counter()
    reached = since = kept[0][0]
    for event in (e for e in work if e["args"]["stream"] == main and since <= e["ts"] < kept[-1][1]):
        waits[event["name"]] += max(0, event["ts"] - reached)
        reached = max(reached, event["ts"] + event["dur"])
    return {
        "steps": len(kept),
        "step": statistics.median(until - since for since, until in kept) / 1000,
        "busy": statistics.median(busy) / 1000,
        "idle": statistics.median(until - since - b for (since, until), b in zip(kept, busy, strict=True)) / 1000,
        "others": statistics.median(_covered(others, *step) for step in kept) / 1000,
        "periods": [round((until - since) / 1000, 3) for since, until in pairwise(marks)],
        "kernels": {name: spent / 1000 / len(kept) for name, spent in total.most_common()},
        "waits": {name: spent / 1000 / len(kept) for name, spent in waits.most_common()},
    }


def _covered(intervals: list[tuple[float, float]], since: float, until: float) -> float:
    """How much of the time from ``since`` to ``until`` lies in any of ``intervals``, which are in order."""
    covered, reached = 0.0, since
    for start, stop in intervals:
        start, stop = max(start, reached), min(stop, until)
        if stop > start:
            covered, reached = covered + stop - start, stop
    return covered
