# SPDX-License-Identifier: Apache-2.0
"""Jobs of ``benchmarks/gpu_round.py`` in order of priority: one command and one result each.

``seconds`` is an estimate for H100 GPUs: 80 s for the start of a pair of engines, and the raw times of earlier results
on H200 GPUs (``benchmarks/results/gpu-cost-*.json``) with the warm-ups, times 1.35 for the slower memory. Most commands
write their file after each cell, so a job that is stopped at the end of the round keeps its first cells: ``least`` is
the time below which it does not start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.gpu_tests import RUNS

SECONDS = "{seconds}"
"""Argument that is replaced by the time that the job may take."""
OUT = "{out}"
"""Argument that is replaced by the path of the result."""
GPUS = "{gpus}"
"""Argument that is replaced by the numbers of the job's GPUs, as several arguments."""


class Job(NamedTuple):
    """A command ``python -m benchmarks.NAME ARGUMENTS``, its result, and what it needs."""

    module: str
    arguments: tuple[str, ...]
    result: str
    seconds: float
    least: float
    gpus: int = 1
    gib: float = 75
    """Memory of each GPU that the job needs, in GiB."""
    timed: bool = True
    """Whether it measures times, so that no test may run beside it unless it is ``coarse``."""
    most: float = 900
    """Seconds after which the job is stopped."""
    title: str = ""
    """Distinguishes jobs with the same result."""
    coarse: bool = False
    """Whether tests on other GPUs and CPU cores may run beside it: its differences are large, or it counts kernels."""

    @property
    def name(self) -> str:
        return self.result.removesuffix(".json") + (f"-{self.title}" if self.title else "")


def _cost(group: str, result: str, seconds: float, least: float, gpus: int = 1, gib: float = 75) -> Job:
    return Job("cost", ("--groups", group, "--out", OUT), result, seconds, least, gpus, gib)


def _serve(shape: str, seconds: float, least: float) -> Job:
    # With caches of a fixed size, both servers start at once. The job "start" measures their starts.
    arguments = ("--shape", shape, "--kv-gib", "9", "--seconds", SECONDS, "--out", OUT)
    return Job("serve", arguments, f"gpu-serve-{shape}.json", seconds, least, most=seconds)


def _kernels(shape: str, seconds: float) -> Job:
    # Written at its end only.
    arguments = ("--shape", shape, "--variants", "idle", "--out", OUT)
    return Job("kernels", arguments, f"gpu-kernels-plain-code-{shape}.json", seconds, seconds, coarse=True)


def _tests(title: str, only: Sequence[str], seconds: float, gpus: int) -> Job:
    arguments = ("--only", *only, "--gpus", GPUS, "--limit", SECONDS, "--out", OUT)
    return Job("gpu_tests", arguments, "gpu-tests.json", seconds, 0.9 * seconds, gpus, 40, False, 570, title)


def gpu_jobs(gpus: int) -> list[Job]:
    """Return the jobs for a host with this number of GPUs, the most important first.

    With four GPUs, all tests run at first on two of them, beside coarse jobs on the others.
    """
    first = ("quantised", "drafts", "points")
    runs = [name for name, run in RUNS.items() if run.gpus <= gpus]
    others = [name for name in runs if name not in first]
    two = [_cost("llama-8b, two GPUs", "gpu-cost-llama-8b-tp2.json", 260, 170, 2, 40)] if gpus > 1 else []
    start = Job(
        "start", ("--shape", "llama-8b", "--variants", "stock", "steering", "--out", OUT), "gpu-start-llama-8b.json",
        500, 300,
    )  # fmt: skip
    patching = Job(
        "patching", ("--group", "llama-8b", "--rounds", "2", "--out", OUT), "gpu-patching-llama-8b.json", 560, 500,
        coarse=True,
    )  # fmt: skip
    kernels = _kernels("granite-4-tiny", 320)
    wide = gpus > 3
    return [
        *([_tests("all", runs, 410, 2), patching, kernels] if wide else [_tests("first", first, 200, min(gpus, 2))]),
        _serve("llama-8b", 560, 400),
        _cost("llama-8b, one pair", "gpu-cost-llama-8b-one-pair.json", 560, 300),
        start,
        _cost("qwen3-0.6b", "gpu-cost-qwen3-0.6b.json", 400, 220),
        _cost("llama-8b, readouts", "gpu-cost-llama-8b-readouts.json", 310, 180),
        _cost("granite-4-tiny", "gpu-cost-granite-4-tiny.json", 400, 220),
        *([] if wide else [kernels]),
        _serve("qwen3-0.6b", 320, 230),
        *two,
        # Two engines of 54 or 61 GB of weights.
        _cost("gemma3-27b", "gpu-cost-gemma3-27b.json", 330, 200, gib=125),
        _cost("qwen3-30b-a3b", "gpu-cost-qwen3-30b-a3b.json", 330, 200, gib=135),
        *([] if wide else [patching]),
        Job("peers_gpu", ("--shape", "llama-8b", "--out", OUT), "gpu-peers-llama-8b.json", 280, 180, coarse=True),
        _kernels("llama-8b", 250),
        *([] if wide else [_tests("others", others, 510, min(gpus, 2))]),
    ]


def tiny_jobs() -> list[Job]:
    """Return the jobs that try the round with tiny shapes on a CPU. They have the drivers of the GPU's jobs."""
    peers = ("--shape", "tiny", "--requests", "1", "8", "--generated", "8", "--repeats", "1", "--kv-gib", "0.25")
    return [
        Job("cost", ("--groups", "tiny", "--out", OUT), "gpu-cost-tiny.json", 150, 60, gib=0),
        Job("start", ("--shape", "tiny", "--eager", "--variants", "stock", "steering", "--out", OUT),
            "gpu-start-tiny.json", 150, 30, gib=0),
        Job("serve", ("--tiny", "--seconds", SECONDS, "--rounds", "1", "--out", OUT), "gpu-serve-tiny.json", 150, 60,
            gib=0, most=150),
        Job("peers_gpu", (*peers, "--out", OUT), "gpu-peers-tiny.json", 150, 60, gib=0),
        Job("patching", ("--group", "cpu", "--rounds", "1", "--out", OUT), "gpu-patching-tiny.json", 200, 60, gib=0),
    ]  # fmt: skip
