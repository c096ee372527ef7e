# SPDX-License-Identifier: Apache-2.0
"""What came of tests on a GPU is what their reports say, and a run without one has failed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_tests
from benchmarks.gpu_tests import RUNS, Run, carry_out, chosen, command_of, in_words
from tests.repo.tree import python_files, read
from vllm_steer.cli.main import app

SUITE = """
import pytest

pytestmark = pytest.mark.gpu

@pytest.fixture
def broken():
    raise RuntimeError

def test_good(): pass
def test_bad(): assert False
def test_error(broken): pass
def test_left_out(): pytest.skip("needs two")
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "test_suite.py"
    path.write_text(SUITE)
    return path


def test_every_test_is_counted_as_what_it_was(tmp_path: Path, suite: Path) -> None:
    """Catches a test that failed, or could not begin, among those that passed; one that was skipped, too."""
    found = carry_out("x", Run((str(suite),), ""), [0], tmp_path, 0, 120)
    assert (found["passed"], found["skipped"]) == (1, 1)
    assert [name.rpartition("::")[2] for name in found["failed"]] == ["test_bad", "test_error"]
    words = in_words(found)
    assert words.startswith("1 passed; 1 skipped; **failed**: ") and words.count("**failed**") == 2


@pytest.mark.parametrize("left", ["test_left_out", "nothing"])
def test_a_run_without_a_test_has_not_passed(tmp_path: Path, suite: Path, left: str) -> None:
    """Catches tests that all skip, as where there is one GPU and two are needed, that stand there as passed."""
    assert carry_out("x", Run((str(suite), "-k", left), ""), [0], tmp_path, 0, 120)["failed"] == ["no test ran"]


def test_a_run_that_takes_too_long_has_failed_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an earlier report taken for this run's, and engines that go on beside the runs after it."""
    pid = tmp_path / "pid"
    child = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"])
open(sys.argv[1], "w").write(str(child.pid))
child.wait()
"""
    monkeypatch.setattr(gpu_tests, "command_of", lambda run, seed: ([sys.executable, "-c", child, str(pid)], "sleep"))
    (tmp_path / "x.xml").write_text("<testsuite><testcase classname='a' name='b'/></testsuite>")
    assert carry_out("x", Run((), ""), [0], tmp_path, 0, 5)["failed"] == ["no report: ended after 5 s"]
    for _ in range(100):
        if not running(int(pid.read_text())):
            return
        time.sleep(0.1)
    raise AssertionError("its child is still there")


def running(pid: int) -> bool:
    """A process that ended and that nobody has asked after does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_findings_of_the_fuzzer_are_failures(tmp_path: Path) -> None:
    """Catches a finding that stands beside the counts of a run that is taken for a good one."""
    report = {"counts": {"requests": 3}, "findings": [{"round": 1, "problems": {"r1": "other tokens"}, "workload": ""}]}
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    found = gpu_tests.outcome_of_fuzzer(path)
    assert found == {"counts": {"requests": 3}, "failed": ["other tokens"]}
    assert in_words(found) == "3 requests compared; **failed**: other tokens"


def test_runs_are_spread_over_gpus_and_those_for_two_get_both() -> None:
    """Catches all runs on the first GPU, and one for two GPUs that is started with one and skips."""
    one, two = chosen([3], None), chosen([0, 1], None)
    assert "parallel" not in one and set(map(tuple, one.values())) == {(3,)}
    assert sorted(two["parallel"]) == [0, 1]
    assert {name for name, gpus in two.items() if gpus == [0]} and {name for name, gpus in two.items() if gpus == [1]}
    assert list(chosen([0], ["kernels"])) == ["kernels"]


@pytest.mark.parametrize("name", list(RUNS))
def test_what_is_run_is_there(name: str) -> None:
    """Catches a file of tests that moved, and an option that the fuzzer does not know, found out on a GPU."""
    run = RUNS[name]
    if run.fuzz:
        from typer.testing import CliRunner

        known = CliRunner().invoke(app, ["fuzz", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
        assert all(each in known for each in command_of(run, 1)[0] if each.startswith("--"))
    else:
        assert (gpu_tests.ROOT / run.arguments[0]).exists()


def test_every_test_that_needs_a_gpu_is_in_a_run() -> None:
    """Catches a new file of GPU tests that no run takes: what is never run cannot fail."""
    marked = [
        path for path in python_files("tests") if "pytest.mark.gpu" in read(path) and path.name != Path(__file__).name
    ]
    taken = [run.arguments[0] for run in RUNS.values() if not run.fuzz]
    assert len(marked) > 5
    assert [path for path in marked if not any(path.is_relative_to(each) for each in taken)] == []
