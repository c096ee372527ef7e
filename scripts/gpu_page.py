# SPDX-License-Identifier: Apache-2.0
"""Sections about tests that ran on a GPU, which CI does not have: of docs/reference/features.md and others."""

from __future__ import annotations

import textwrap
from typing import Any

from pages import load_result, table

from benchmarks.gpu_tests import RUNS, summarize

TEXT = """CI has no GPU. The table has the outcomes of the last runs of the GPU tests and of the fuzzer (`python -m
benchmarks.gpu_tests`, {gpu}, vLLM {vllm}, torch {torch}, Triton {triton}; `benchmarks/results/gpu-tests.json`).
`python -m benchmarks.build` lists the parts of the code that have changed since. The fuzzer, `vllm-steer fuzz`, runs
random workloads and compares each request with the same request run alone.

"""


def read_runs() -> dict[str, dict[str, Any]]:
    """Return the last outcome of each run of ``benchmarks/gpu_tests.py``."""
    runs: dict[str, dict[str, Any]] = load_result("gpu-tests.json")["runs"]
    return runs


def gpu_outcome(test: str) -> str | None:
    """Return the outcome of a test in ``tests/gpu`` in the last run of its file, or None if the file was not run."""
    file, _, name = test.partition("::")
    for run in read_runs().values():
        if file in run["command"].split():
            failed = (each.rpartition("::")[2].partition("[")[0] for each in run["failed"])
            return "failed" if name in failed or "no test ran" in run["failed"] else "passed"
    return None


def gpu_failures() -> str:
    """Return the sentences of the page on limitations about the tests that failed in the last runs."""
    runs = read_runs().values()
    failed = [
        f"`{each.removeprefix('tests.gpu.')}` ({run['covers'].replace('``', '`')})"
        for run in runs
        for each in run["failed"]
    ]
    if not failed:
        return "All tests of the last [GPU runs](../reference/features.md#on-a-gpu) passed.\n"
    shown = "".join(f"* {each}\n" for each in dict.fromkeys(failed))
    notes = [run["note"] for run in runs if run["failed"] and run.get("note")]
    text = (
        "The last [GPU runs](../reference/features.md#on-a-gpu) failed in these cases, which a GPU has therefore not\n"
        "proven:\n\n"
    )
    return text + shown + "".join(f"\n{textwrap.fill(note, 120)}\n" for note in notes)


def gpu_tests() -> str:
    runs = read_runs()
    rows = [
        (found["covers"].replace("``", "`"), f"`{found['command']}`", summarize(found), found.get("note", ""))
        for found in runs.values()
    ]
    environment = next(iter(runs.values()))["environment"]
    return TEXT.format(**environment) + table(("tested", "command", "outcome", "note"), rows)


def newest_version() -> str:
    """Return the sentences about GPU tests with the newest version of vLLM, of which no CPU build exists."""
    result = load_result("gpu-tests-vllm-0.33.json")
    runs: dict[str, dict[str, Any]] = result["runs"]
    about = next(iter(runs.values()))["environment"]
    ended = {name: run for name, run in runs.items() if not any("no report" in each for each in run["failed"])}
    failed = sum(len(run["failed"]) for run in ended.values())
    requests = sum(run["counts"]["requests"] for run in ended.values() if "counts" in run)
    text = (
        f"On {about['date']}, {len(ended)} of the {len(RUNS)} runs of `benchmarks/gpu_tests.py` ended on a host with "
        f"{about['gpus']} {about['gpu']} with vLLM {about['vllm']} and torch {about['torch'].partition('+')[0]}: "
        f"{sum(run.get('passed', 0) for run in ended.values())} tests passed and {failed or 'none'} failed"
        f"{f', and the fuzzer compared {requests} requests' if requests else ''} "
        "(`benchmarks/results/gpu-tests-vllm-0.33.json`)."
    )
    if cut := [f"*{name}*" for name in runs if name not in ended]:
        text += f" A time limit ended {len(cut)} runs without a report: {', '.join(cut)}."
    if missing := [f"*{name}*" for name in RUNS if name not in runs]:
        text += f" Not run with it yet: {', '.join(missing)}."
    text += "".join(f" {run['note']}" for run in runs.values() if run["failed"] and "note" in run)
    return textwrap.fill(text, 120, break_long_words=False) + "\n"
