# SPDX-License-Identifier: Apache-2.0
"""Tests of the GPU test runner: a report without passed tests is a failure."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_tests
from benchmarks.gpu_tests import RUNS, Run, assign_gpus, command_for, execute, summarize
from tests.repo.tree import python_files, read
from vllm_steer.cli.main import app

# The suite that the tested runner runs: one test for each outcome.
SUITE = """
import pytest

pytestmark = pytest.mark.gpu

@pytest.fixture
def broken():
    raise RuntimeError

def test_good(): pass
def test_bad(): assert False
def test_error(broken): pass
def test_skipped(): pytest.skip("needs two GPUs")
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "test_suite.py"
    path.write_text(SUITE)
    return path


def test_counts_every_outcome(tmp_path: Path, suite: Path) -> None:
    """Catches failures, errors and skips counted as passed."""
    found = execute("x", Run((str(suite),), ""), [0], tmp_path, 0, 120)
    assert (found["passed"], found["skipped"]) == (1, 1)
    assert [name.rpartition("::")[2] for name in found["failed"]] == ["test_bad", "test_error"]
    words = summarize(found)
    assert words.startswith("1 passed; 1 skipped; **failed**: ") and words.count("**failed**") == 2


@pytest.mark.parametrize("left", ["test_skipped", "nothing"])
def test_run_without_tests_fails(tmp_path: Path, suite: Path, left: str) -> None:
    """Catches a run whose tests are all skipped, for example for lack of GPUs, counted as passed."""
    assert execute("x", Run((str(suite), "-k", left), ""), [0], tmp_path, 0, 120)["failed"] == ["no test ran"]


def test_timeout_fails_and_kills_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an outdated report used for this run, and child processes that survive it."""
    pid = tmp_path / "pid"
    child = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"])
open(sys.argv[1], "w").write(str(child.pid))
child.wait()
"""
    monkeypatch.setattr(gpu_tests, "command_for", lambda run, seed: ([sys.executable, "-c", child, str(pid)], "sleep"))
    (tmp_path / "x.xml").write_text("<testsuite><testcase classname='a' name='b'/></testsuite>")
    assert execute("x", Run((), ""), [0], tmp_path, 0, 5)["failed"] == ["no report: ended after 5 s"]
    for _ in range(100):
        if not running(int(pid.read_text())):
            return
        time.sleep(0.1)
    raise AssertionError("its child is still there")


def running(pid: int) -> bool:
    """Return whether the process runs; zombies do not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_fuzzer_findings_are_failures(tmp_path: Path) -> None:
    """Catches a run with findings reported as successful."""
    report = {"counts": {"requests": 3}, "findings": [{"round": 1, "problems": {"r1": "other tokens"}, "workload": ""}]}
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    found = gpu_tests.outcome_of_fuzzer(path)
    assert found == {"counts": {"requests": 3}, "failed": ["other tokens"]}
    assert summarize(found) == "3 requests compared; **failed**: other tokens"


def test_assigns_gpus() -> None:
    """Catches all runs on the first GPU, and a run for two GPUs that gets one."""
    one, two = assign_gpus([3], None), assign_gpus([0, 1], None)
    assert "parallel" not in one and set(map(tuple, one.values())) == {(3,)}
    assert sorted(two["parallel"]) == [0, 1]
    assert {name for name, gpus in two.items() if gpus == [0]} and {name for name, gpus in two.items() if gpus == [1]}
    assert list(assign_gpus([0], ["kernels"])) == ["kernels"]


@pytest.mark.parametrize("name", list(RUNS))
def test_runs_are_valid(name: str) -> None:
    """Catches a moved test file and an unknown option of the fuzzer, which would only fail on a GPU host."""
    run = RUNS[name]
    if run.fuzz:
        from typer.testing import CliRunner

        known = CliRunner().invoke(app, ["fuzz", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
        assert all(each in known for each in command_for(run, 1)[0] if each.startswith("--"))
    else:
        assert (gpu_tests.ROOT / run.arguments[0]).exists()


def test_runs_cover_every_gpu_test() -> None:
    """Catches a file of GPU tests that no run contains."""
    marked = [
        path for path in python_files("tests") if "pytest.mark.gpu" in read(path) and path.name != Path(__file__).name
    ]
    taken = [run.arguments[0] for run in RUNS.values() if not run.fuzz]
    assert len(marked) > 5
    assert [path for path in marked if not any(path.is_relative_to(each) for each in taken)] == []
