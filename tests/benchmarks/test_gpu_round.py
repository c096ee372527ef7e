# SPDX-License-Identifier: Apache-2.0
"""Tests of the GPU round: jobs by priority, alone with their GPUs, within the time."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
from itertools import combinations
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu_round
from benchmarks.cost import variants
from benchmarks.gpu_jobs import OUT, Job, gpu_jobs
from benchmarks.gpu_round import choose, lacking, plan, run_jobs
from benchmarks.groups import CONTROL, GROUPS


def job(name: str, seconds: float, **fields: object) -> Job:
    return Job("none", (), f"{name}.json", seconds, seconds, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_planned_jobs_share_no_gpu_and_no_timing_runs_beside_tests(gpus: int) -> None:
    """Catches two jobs on one GPU, a figure measured beside tests, and a job after the end of the round."""
    steps, skipped = plan(gpu_jobs(gpus), gpus, 3600)
    assert {step.job.name for step in steps} | {each.name for each in skipped} == {x.name for x in gpu_jobs(gpus)}
    assert not steps[0].job.timed and max(step.end for step in steps) <= 3600
    for one, other in combinations(steps, 2):
        if one.start < other.end and other.start < one.end:
            assert not {*one.gpus} & {*other.gpus}, (one, other)
            exact = [each.job.timed and not each.job.coarse for each in (one, other)]
            assert not any(exact) or (one.job.timed and other.job.timed), (one, other)


def test_job_for_all_gpus_is_not_passed_by_longer_ones() -> None:
    """Catches a job for two GPUs that starves, because one of them always has another job."""
    two, long, short = job("two", 50, gpus=2), job("long", 90), job("short", 20)
    running = [(job("other", 60), 40.0)]
    assert choose([two, long, short], [1], running, 500) == short
    assert choose([two, long], [1], running, 500) is None
    assert choose([two, long], [0, 1], [], 500) == two


def test_only_coarse_jobs_run_beside_tests() -> None:
    """Catches tests that start beside an exact measurement, and an exact one that starts beside tests."""
    tests, exact, coarse = job("tests", 50, timed=False), job("exact", 50), job("coarse", 30, coarse=True)
    for running in ([(tests, 40.0)], [(coarse, 40.0), (tests, 40.0)]):
        assert choose([exact, coarse], [1], running, 500) == coarse
        assert choose([exact], [1], running, 500) is None
    assert choose([tests], [1], [(exact, 40.0)], 500) is None
    assert choose([tests], [1], [(coarse, 40.0)], 500) == tests


def test_job_that_does_not_fit_is_passed() -> None:
    """Catches a round that ends early because its next job is too long."""
    assert choose([job("long", 300), job("short", 100)], [0], [], 200) == job("short", 100)
    assert choose([job("long", 300)], [0], [], 200) is None


def test_jobs_without_their_memory_or_gpus_are_named() -> None:
    """Catches a job that fails on a smaller GPU after minutes."""
    assert lacking(job("big", 1, gib=125), 1, 79) == "needs 125 GiB on each GPU"
    assert lacking(job("two", 1, gpus=2), 1, 79) == "needs 2 GPUs"
    assert lacking(job("one", 1), 1, 79) is None


def test_jobs_name_existing_groups_and_variants() -> None:
    """Catches a renamed group or variant, which would fail only on a GPU host."""
    known = {*variants(4, 8), CONTROL}
    for each in gpu_jobs(4):
        if each.module == "cost":
            assert each.arguments[1] in GROUPS
    assert {cell.partition("@")[0] for group in GROUPS.values() for cell in group.cells} <= known


SCRIPT = """
import json, pathlib, subprocess, sys, time
out, action = pathlib.Path(sys.argv[1]), sys.argv[2]
out.write_text(json.dumps({"runs": out.exists()}))
if action == "hang":
    # As a worker of vLLM does, the grandchild outlives its parent, in a session of its own and without its environment.
    code = "import subprocess as s, sys, time; sleep = [sys.executable, '-c', 'import time; time.sleep(600)']; "
    code += "print(s.Popen(sleep, start_new_session=True, env={}).pid, flush=True); time.sleep(1)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    out.with_suffix(".pid").write_text(child.stdout.readline())
    time.sleep(600)
sys.exit(action == "fail")
"""


def test_round_records_outcomes_kills_children_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Catches a server that survives its stopped job, a lost result, and a finished job that runs again."""
    monkeypatch.setattr(gpu_round, "LOOK_SECONDS", 0.1)
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(
        gpu_round, "command_of",
        lambda job, folder, *_: [sys.executable, str(script), str(folder / job.result), *job.arguments],
    )  # fmt: skip
    jobs = [Job("x", (action,), f"{action}.json", 1, 0, most=most, gib=0)
            for action, most in (("end", 60), ("fail", 60), ("hang", 3))]  # fmt: skip
    folder = tmp_path / "round"
    folder.mkdir()
    found = run_jobs(jobs, 1, time.monotonic() + 120, folder, tmp_path / "all.tgz")
    assert {name: each["outcome"] for name, each in found.items()} == {
        "end": "done", "fail": "failed", "hang": "stopped",
    }  # fmt: skip
    child = int((folder / "hang.pid").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    with tarfile.open(tmp_path / "all.tgz") as tar:
        assert {"end.json", "fail.json", "hang.json", "round.json"} <= set(tar.getnames())
    run_jobs(jobs[:2], 1, time.monotonic() + 60, folder, None)
    again = {name: json.loads((folder / f"{name}.json").read_text())["runs"] for name in ("end", "fail")}
    assert again == {"end": False, "fail": True}


def test_plan_is_printed_without_a_gpu() -> None:
    """Catches a plan that needs the GPU host."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_round", "--plan", "--gpus", "2"], capture_output=True, text=True,
        check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert "gpu-tests" in done.stdout and OUT not in done.stdout
