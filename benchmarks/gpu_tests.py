# SPDX-License-Identifier: Apache-2.0
"""Runner of the GPU tests and the fuzzer on a GPU host, in parallel, which records their outcomes.

    python -m benchmarks.gpu_tests --out benchmarks/results/gpu-tests.json
    python -m benchmarks.gpu_tests --out benchmarks/results/gpu-tests.json --only kernels "fuzz bfloat16" --gpus 0

Each run is a separate process with a log in the directory ``--logs``. It needs little GPU memory, so other engines can
run beside it. The file keeps the previous outcomes of runs that are not selected, and also records failures and
timeouts. It is written after each run and identifies the tested code (see ``benchmarks.build``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.build import ROOT


class Run(NamedTuple):
    """Arguments of one run of ``python -m pytest`` or ``vllm-steer fuzz``."""

    arguments: tuple[str, ...]
    covers: str
    gpus: int = 1
    fuzz: bool = False


_FUZZ = ("--minutes", "5", "--graphs", "--keep-going")
RUNS: dict[str, Run] = {
    "kernels": Run(("tests/taps",), "kernels of taps, captures and projections against their definitions; controls"),
    "engine": Run(("tests/gpu/test_engine.py",), "runner V2 with CUDA graphs, V2 eager, V1 with CUDA graphs agree"),
    "capture": Run(("tests/gpu/test_capture.py",), "captures against HF, graphs and eager, asynchronous, small cache"),
    "collect": Run(
        ("tests/gpu/test_device_to_host.py",), "rows copied on a side stream while the next step writes"
    ),
    "staged": Run(("tests/engine/test_pinned_writer.py",), "values written through pinned memory into a table"),
    "self-check": Run(("tests/gpu/test_self_check.py",), "correct and incorrect taps"),
    "warm-up": Run(("tests/gpu/test_warm_up.py",), "no kernel is compiled after the warm-up"),
    "plain code": Run(
        ("tests/gpu/test_untapped_model.py",), "idle steps run stock vLLM's kernels, with both sets of graphs"
    ),
    "overflow": Run(("tests/gpu/test_overflow.py",), "cache blocks of overflowed requests, reused by other requests"),
    "gates": Run(("tests/gpu/test_dynamic.py",), "gates and stops in graphs, under both runners, after preemptions"),
    "replace": Run(("tests/gpu/test_replace.py",), "replaced rows against HF, in graphs, under both runners"),
    "heads": Run(("tests/gpu/test_heads.py",), "lens and SAE against the sampler and the encoder, under both runners"),
    "features": Run(("tests/gpu/test_features.py",), "feature edits against their formula, under both runners"),
    "chat model": Run(("tests/gpu/test_chat_model.py",), "a trained model's requests against HF, float32 and bfloat16"),
    "sleep": Run(("tests/gpu/test_sleep.py",), "sleep of level 1 and 2"),
    "recurrent": Run(("tests/gpu/test_recurrent.py",), "recurrent layers, piecewise graphs"),
    "architectures": Run(
        ("tests/gpu/test_architectures.py",),
        "architectures with GPU-only kernels against HF (``architectures-gpu.json``)"
    ),
    "frontier": Run(
        ("tests/gpu/test_frontier.py",),
        "newest models with vLLM's own kernels, mixes and caches, each in its own process (``frontier-gpu.json``)"
    ),
    "points": Run(("tests/gpu/test_points.py",), "each site of engines with optional points, alone in its batch"),
    "drafts": Run(("tests/gpu/test_mtp.py",), "layers for multi-token prediction as drafter, under both runners"),
    "quantised": Run(("tests/gpu/test_quantised.py",), "quantised weights and key-value caches, by identities"),
    "parallel": Run(
        ("tests/gpu/test_parallel.py", "-k", "not two_engines"), "tensor, expert and pipeline parallel", gpus=2
    ),
    "fuzz float32": Run((*_FUZZ, "--dtype", "float32"), "random workloads against each request alone", fuzz=True),
    "fuzz bfloat16": Run((*_FUZZ, "--dtype", "bfloat16"), "random workloads against each request alone", fuzz=True),
}  # fmt: skip
_CLI = "from vllm_steer.cli.main import app; app()"
_PYTEST = ("-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "-q", "--tb=short", "-W",
           "ignore", "-m", "gpu")  # fmt: skip


def command_for(run: Run, seed: int) -> tuple[list[str], str]:
    """Return the command without its report option, and its form for documentation."""
    if run.fuzz:
        arguments = [*run.arguments, "--seed", str(seed)]
        return [sys.executable, "-c", _CLI, "fuzz", *arguments], " ".join(["vllm-steer fuzz", *arguments])
    shown = " ".join(f"'{each}'" if " " in each else each for each in run.arguments)
    return [sys.executable, *_PYTEST, *run.arguments], f"python -m pytest -m gpu {shown}"


def outcome_of_tests(report: Path) -> dict[str, Any]:
    """Return passed, skipped and failed tests of a JUnit report."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    states = [{child.tag for child in case} & {"failure", "error", "skipped"} for case in cases]
    bad = [f"{case.get('classname')}::{case.get('name')}" for case, state in zip(cases, states, strict=True)
           if state & {"failure", "error"}]  # fmt: skip
    skipped = sum(state == {"skipped"} for state in states)
    passed = len(cases) - len(bad) - skipped
    return {"passed": passed, "skipped": skipped, "failed": bad if passed or bad else ["no test ran"]}


def outcome_of_fuzzer(report: Path) -> dict[str, Any]:
    """Return the counts and the findings of a fuzzer report."""
    found = json.loads(report.read_text())
    return {"counts": found["counts"], "failed": [problem for each in found["findings"]
                                                  for problem in each["problems"].values()]}  # fmt: skip


def summarize(found: Mapping[str, Any]) -> str:
    """Return a one-line summary of an outcome, with every failure."""
    if "counts" in found:
        parts = [f"{found['counts']['requests']} requests compared"]
    else:
        parts = [f"{found.get('passed', 0)} passed"]
    parts += [f"{found['skipped']} skipped"] if found.get("skipped") else []
    return "; ".join([*parts, *(f"**failed**: {each}" for each in dict.fromkeys(found["failed"]))])


def run_command(command: list[str], env: dict[str, str], log: Path, limit: float) -> str:
    """Run a command and return how it ended. Its child processes are killed at the end and on timeout."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=ROOT, start_new_session=True
        )
    try:
        return f"exit status {process.wait(limit)}"
    except subprocess.TimeoutExpired:
        return f"ended after {limit:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def execute(name: str, run: Run, gpus: Sequence[int], logs: Path, seed: int, limit: float) -> dict[str, Any]:
    """Execute a run and return its outcome; ``failed`` is empty on success."""
    command, shown = command_for(run, seed)
    report = logs / f"{name.replace(' ', '-')}.{'json' if run.fuzz else 'xml'}"
    report.unlink(missing_ok=True)
    command += ["--out", str(report)] if run.fuzz else [f"--junitxml={report}"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    started = time.monotonic()
    status = run_command(command, env, report.with_suffix(".log"), limit)
    found: dict[str, Any] = {"failed": [f"no report: {status}"]}
    if report.exists():
        found = outcome_of_fuzzer(report) if run.fuzz else outcome_of_tests(report)
    return {
        "command": shown, "covers": run.covers, **found, "seconds": round(time.monotonic() - started),
        "gpus": len(gpus),
    }  # fmt: skip


def assign_gpus(gpus: Sequence[int], only: Sequence[str] | None) -> dict[str, list[int]]:
    """Return the GPUs of each selected run, assigned in rotation. Runs that need more GPUs are left out."""
    wanted = {name: run for name, run in RUNS.items() if only is None or name in only}
    return {
        name: [gpus[(i + k) % len(gpus)] for k in range(run.gpus)]
        for i, (name, run) in enumerate(wanted.items())
        if run.gpus <= len(gpus)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=Path("/tmp/gpu-tests"))
    parser.add_argument("--only", nargs="+", choices=list(RUNS))
    parser.add_argument("--gpus", nargs="+", type=int, default=[0])
    parser.add_argument("--at-once", type=int, default=len(RUNS))
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000, help="seed of the fuzzer")
    parser.add_argument("--limit", type=float, default=570, help="time limit of a run in seconds")
    arguments = parser.parse_args()
    arguments.logs.mkdir(parents=True, exist_ok=True)

    from benchmarks.shapes import environment  # initializes CUDA, so only after parsing the arguments

    runs: dict[str, Any] = json.loads(arguments.out.read_text())["runs"] if arguments.out.exists() else {}
    about = environment()
    failed = False
    with ThreadPoolExecutor(arguments.at_once) as pool:
        waited = {
            pool.submit(execute, name, RUNS[name], gpus, arguments.logs, arguments.seed, arguments.limit): name
            for name, gpus in assign_gpus(arguments.gpus, arguments.only).items()
        }
        for done in as_completed(waited):
            name, found = waited[done], done.result()
            failed |= bool(found["failed"])
            runs[name] = {**found, "environment": about}
            ordered = {each: runs[each] for each in RUNS if each in runs}
            arguments.out.write_text(json.dumps({"runs": ordered}, indent=1) + "\n")
            print(
                name,
                {key: found[key] for key in found if key in ("passed", "skipped", "failed", "seconds")},
                flush=True,
            )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
