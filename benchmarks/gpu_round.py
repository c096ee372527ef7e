# SPDX-License-Identifier: Apache-2.0
"""Run all drivers of the performance page on a GPU host, by priority and within a time limit.

    python -m benchmarks.gpu_round --plan --seconds 1500 --gpus 2
    python -m benchmarks.gpu_round --seconds 1500 --gpus 2 --out results --commit 0123456789ab
    python -m benchmarks.gpu_round --tiny --seconds 900 --out /tmp/round      # on the CPU, to try the script

Each job (``benchmarks/gpu_jobs.py``) is a process of its own with a log, on GPUs and CPU cores of its own. GPU tests
do not run beside a job that measures times exactly. A job that does not fit into the remaining time is passed by the
next one that does; one that reaches the end is killed with its children and keeps what its file has.

Running the command again with the same folder continues: jobs with a complete result of the present code are left out.
So a time limit of single commands does not limit the round; with ``--whole``, only jobs start that end in time.
``round.json`` in the folder has the outcome of each job. ``--archive`` names a file that holds the results and the ends
of the logs, rewritten after each job, for hosts from which only a few files come back. ``--commit`` is recorded in the
results if the tree is not a git repository.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.build import COMMIT_VARIABLE, RESULTS, ROOT, digests
from benchmarks.gpu_jobs import GPUS, OUT, SECONDS, Job, gpu_jobs, tiny_jobs

RESERVE = 5.0
"""Seconds at the end for ending processes and writing files."""
LOG_BYTES = 20_000
LOOK_SECONDS = 5.0
"""Seconds between two looks at the descendants of a job."""


class Running(NamedTuple):
    """A job that runs."""

    job: Job
    process: subprocess.Popen[bytes]
    gpus: tuple[int, ...]
    started: float
    limit: float
    family: set[psutil.Process]
    """Descendants seen so far."""


class Step(NamedTuple):
    """A planned job: its GPUs, and its start and end in seconds from the start of the round."""

    job: Job
    gpus: tuple[int, ...]
    start: float
    end: float


def choose(
    waiting: Sequence[Job], free: Sequence[int], running: Sequence[tuple[Job, float]], left: float
) -> Job | None:
    """Return the next job for the free GPUs, or None if none may start now.

    Args:
        waiting: Jobs by priority.
        free: GPUs without a job.
        running: Jobs that run, with the seconds until their estimated ends.
        left: Seconds until the end of the round.
    """
    tested = any(not job.timed for job, _ in running)
    timed = any(job.timed and not job.coarse for job, _ in running)
    wait = max((seconds for _, seconds in running), default=0.0)
    held = False
    for job in waiting:
        if job.least > left:
            continue
        fits = job.gpus <= len(free) and not (tested and not job.coarse if job.timed else timed)
        # A job that waits for other GPUs is passed only by jobs that end before those are free.
        if fits and (not held or job.seconds <= wait):
            return job
        held = held or job.least <= left - wait
    return None


def plan(jobs: Sequence[Job], gpus: int, seconds: float) -> tuple[list[Step], list[Job]]:
    """Return when each job would run if estimates were right, and the jobs without enough time."""
    steps: list[Step] = []
    waiting, now = list(jobs), 0.0
    while True:
        active = [step for step in steps if step.end > now]
        free = [gpu for gpu in range(gpus) if all(gpu not in step.gpus for step in active)]
        job = choose(waiting, free, [(step.job, step.end - now) for step in active], seconds - RESERVE - now)
        if job is not None:
            waiting.remove(job)
            end = min(now + min(job.seconds, job.most), seconds - RESERVE)
            steps.append(Step(job, tuple(free[: job.gpus]), now, end))
        elif active:
            now = min(step.end for step in active)
        else:
            return steps, waiting


def lacking(job: Job, gpus: int, gib: float) -> str | None:
    """Return what the host lacks for a job, or None."""
    if job.gpus > gpus:
        return f"needs {job.gpus} GPUs"
    return f"needs {job.gib:g} GiB on each GPU" if job.gib > gib else None


def is_done(job: Job, folder: Path, outcomes: Mapping[str, Any]) -> bool:
    """Return whether the folder has a complete result of the present code."""
    path = folder / job.result
    if outcomes.get(job.name, {}).get("outcome") != "done" or not path.exists():
        return False
    # Runs of GPU tests are kept from earlier rounds, so the outcome's digests decide.
    return bool(outcomes[job.name].get("build") == digests())


def command_of(job: Job, folder: Path, gpus: Sequence[int], limit: float) -> list[str]:
    """Return a job's command with the paths, times and GPUs in it."""
    values = {OUT: [str(folder / job.result)], SECONDS: [f"{limit:.0f}"], GPUS: [str(gpu) for gpu in gpus]}
    arguments = [part for argument in job.arguments for part in values.get(argument, [argument])]
    return [sys.executable, "-m", f"benchmarks.{job.module}", *arguments]


def launch(job: Job, folder: Path, gpus: tuple[int, ...], all_gpus: int, limit: float) -> Running:
    """Start a job on GPUs and on its share of the CPU cores."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if job.timed:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    command = command_of(job, folder, gpus, limit)
    with (folder / f"{job.name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=ROOT)
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // all_gpus
    mine = {core for gpu in gpus for core in cores[gpu * share : (gpu + 1) * share]}
    if mine:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(process.pid, mine)
    return Running(job, process, gpus, time.monotonic(), limit, set())


def note_family(run: Running) -> None:
    """Remember the descendants of a job, because those that outlive their parents cannot be found later."""
    with contextlib.suppress(psutil.Error):
        run.family.update(psutil.Process(run.process.pid).children(recursive=True))


def kill(run: Running) -> None:
    """Kill a job with all its descendants, also those in sessions of their own and those whose parents have ended."""
    note_family(run)
    for process in (run.process, *run.family):
        with contextlib.suppress(psutil.Error):
            process.kill()
    run.process.wait()


def outcome_of(run: Running, folder: Path, status: int | None) -> dict[str, Any]:
    """Return how a job ended; ``status`` is None if it was stopped."""
    outcome = "stopped" if status is None else "done" if status == 0 else "failed"
    if status and run.job.module == "gpu_tests":
        outcome = "done"  # tests failed, which is a result
    if outcome == "done" and run.job.module == "serve":
        found = json.loads((folder / run.job.result).read_text())
        outcome = "done" if found["figures"] else "stopped"  # its own time limit came before the first figure
    return {
        "outcome": outcome, "status": status, "seconds": round(time.monotonic() - run.started), "gpus": run.gpus,
        "has_result": bool((folder / run.job.result).exists()), "build": digests(),
    }  # fmt: skip


def archive(folder: Path, path: Path) -> None:
    """Write the results and the ends of the logs into one file, which appears at once."""
    whole = path.with_suffix(".part")
    ends = folder / "log-ends"
    ends.mkdir(exist_ok=True)
    for log in folder.glob("*.log"):
        (ends / log.name).write_bytes(log.read_bytes()[-LOG_BYTES:])
    with tarfile.open(whole, "w:gz") as tar:
        for each in sorted((*folder.glob("*.json"), *ends.glob("*.log"))):
            tar.add(each, each.relative_to(folder))
    whole.replace(path)


def run_jobs(jobs: Sequence[Job], gpus: int, end: float, folder: Path, archive_to: Path | None) -> dict[str, Any]:
    """Run the jobs until none is left or the time is over, and return the outcomes by name."""
    record = folder / "round.json"
    outcomes: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    waiting = [job for job in jobs if not is_done(job, folder, outcomes)]
    running: list[Running] = []
    looked = 0.0

    def note(name: str, outcome: dict[str, Any]) -> None:
        outcomes[name] = outcome
        record.write_text(json.dumps(outcomes, indent=1) + "\n")
        if archive_to is not None:
            archive(folder, archive_to)
        print(f"{name}: {', '.join(str(outcome[key]) for key in ('outcome', 'seconds') if key in outcome)}", flush=True)

    try:
        while True:
            now = time.monotonic()
            for run in list(running):
                status = run.process.poll()
                if status is None and now < run.started + run.limit:
                    continue
                kill(run)
                running.remove(run)
                note(run.job.name, outcome_of(run, folder, status))
            if now > looked + LOOK_SECONDS:
                looked = now
                for run in running:
                    note_family(run)
            free = [gpu for gpu in range(gpus) if all(gpu not in run.gpus for run in running)]
            ends = [(run.job, max(run.started + min(run.job.seconds, run.limit) - now, 0.0)) for run in running]
            job = choose(waiting, free, ends, end - RESERVE - now)
            if job is not None:
                waiting.remove(job)
                limit = min(job.most, end - RESERVE - now)
                print(f"{job.name}: starts on {free[: job.gpus]} for at most {limit:.0f} s", flush=True)
                running.append(launch(job, folder, tuple(free[: job.gpus]), gpus, limit))
            elif running:
                time.sleep(0.5)
            else:
                break
    finally:
        for run in running:
            kill(run)
    for job in waiting:
        note(job.name, {"outcome": "skipped: not enough time"})
    return outcomes


def print_plan(steps: Sequence[Step], skipped: Sequence[Job]) -> None:
    for step in steps:
        on = ", ".join(map(str, step.gpus))
        cut = "" if step.end - step.start >= min(step.job.seconds, step.job.most) else "  (cut off)"
        print(f"{step.start:6.0f} to {step.end:6.0f} s  GPU {on:5} {step.job.name}{cut}")
    for job in skipped:
        print(f"      not enough time      {job.name} (about {job.seconds:.0f} s)")


def memory_gib() -> float:
    """Return the smallest memory of the host's GPUs, found in another process, because this one must not use them."""
    each = "torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())"
    code = f"import torch; print(min({each}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(found.stdout.split()[-1]) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1500, help="time limit of this command")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs")
    parser.add_argument("--gib", type=float, help="memory of each GPU; default: as found (with --plan: 79)")
    parser.add_argument("--out", type=Path, default=Path("/tmp/gpu-round"), help="folder of the results")
    parser.add_argument("--archive", type=Path, help="file with all results, rewritten after each job")
    parser.add_argument("--commit", help="commit of a tree that is not a git repository")
    parser.add_argument("--only", nargs="+", help="names of results, to run only these jobs")
    parser.add_argument("--whole", action="store_true", help="start only jobs that end in time")
    parser.add_argument("--plan", action="store_true", help="print the plan and exit")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    gib = arguments.gib or (79 if arguments.plan or arguments.tiny else memory_gib())
    jobs = tiny_jobs() if arguments.tiny else gpu_jobs(arguments.gpus)
    if arguments.only:
        jobs = [job for job in jobs if job.name in arguments.only]
    if arguments.whole:
        jobs = [job._replace(least=min(job.seconds, job.most)) for job in jobs]
    for job in jobs:
        if why := lacking(job, arguments.gpus, gib):
            print(f"{job.name}: {why}, left out")
    jobs = [job for job in jobs if lacking(job, arguments.gpus, gib) is None]
    if arguments.plan:
        print_plan(*plan(jobs, arguments.gpus, arguments.seconds))
        return
    if arguments.commit:
        os.environ[COMMIT_VARIABLE] = arguments.commit
    if arguments.tiny:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    arguments.out.mkdir(parents=True, exist_ok=True)
    # The runner of the tests keeps the runs of other tests, and the driver for peers the rows of other projects.
    for name in ("gpu-tests.json", "gpu-peers-llama-8b.json"):
        if (RESULTS / name).exists() and not (arguments.out / name).exists():
            shutil.copy(RESULTS / name, arguments.out)
    outcomes = run_jobs(jobs, arguments.gpus, end, arguments.out, arguments.archive)
    failed = [job.name for job in jobs if outcomes.get(job.name, {}).get("outcome") == "failed"]
    if failed:
        sys.exit(f"benchmarks.gpu_round: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
