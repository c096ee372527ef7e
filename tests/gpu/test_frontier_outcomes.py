# SPDX-License-Identifier: Apache-2.0
"""Processes of the newest models and the file of their outcomes; these tests run on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import frontier_outcomes
from tests.gpu.frontier_outcomes import NEEDS, missing_package, run_model, store

WRITE = "import json, sys; json.dump({'row': sys.argv[1], 'outcome': 'passed'}, open(sys.argv[2], 'w'))"
NAME = "deepseek_v3"


def run(program: str, folder: Path, seconds: float = 60) -> dict[str, Any]:
    return run_model(NAME, folder, seconds, (sys.executable, "-c", program))


def test_returns_what_the_process_writes(tmp_path: Path) -> None:
    """Catches an outcome that another run left."""
    assert run(WRITE, tmp_path) == {"row": NAME, "outcome": "passed"}
    assert run("", tmp_path)["outcome"] == "failed"


def test_dead_and_hanging_processes_fail(tmp_path: Path) -> None:
    """Catches a model that stops the others: by an illegal memory access, which ends its process, or by waiting."""
    died = run("import os; print('illegal memory access', flush=True); os.abort()", tmp_path)
    assert died["outcome"] == "failed" and died["error"] == ["illegal memory access", "exit status -6"]
    hung = run("import time; time.sleep(600)", tmp_path, seconds=1)
    assert hung["error"] == ["killed after 1 s"]


def test_missing_packages_skip_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a failure that says nothing about the taps, and a skip that does not name the package."""
    monkeypatch.setattr(frontier_outcomes, "is_installed", lambda module: module != "deep_gemm")
    assert "deep_gemm" in NEEDS["deepseek_v4"]
    assert run_model("deepseek_v4", tmp_path, 1) == {
        "row": "deepseek_v4", "outcome": "skipped", "reason": "needs DeepGEMM"
    }  # fmt: skip


def test_errors_of_missing_packages() -> None:
    """Catches a failed import inside vLLM counted as a wrong tap, and other errors counted as a missing package."""
    vllms = RuntimeError("Sparse Attention Indexer CUDA op requires DeepGEMM support in the current vLLM environment.")
    assert missing_package(vllms) == "needs DeepGEMM"
    with pytest.raises(RuntimeError) as caught:
        try:
            raise ModuleNotFoundError("No module named 'cutlass.cute'", name="cutlass.cute")
        except ModuleNotFoundError as error:
            raise RuntimeError("the kernel does not compile") from error
    assert missing_package(caught.value) == "needs nvidia-cutlass-dsl"
    assert missing_package(ModuleNotFoundError("No module named 'tests.gone'", name="tests.gone")) is None
    assert missing_package(AssertionError("off by 1.0e+00 of 1.0e+00")) is None


def test_outcomes_are_merged_by_model(tmp_path: Path) -> None:
    """Catches a run of one model that removes the others, a failure that hides behind an older pass, and lost dates."""
    path = tmp_path / "out" / "frontier.json"

    def put(row: str, outcome: str, date: str) -> None:
        store({"row": row, "outcome": outcome}, path, {"date": date})

    def found() -> dict[str, tuple[str, str]]:
        rows = json.loads(path.read_text())["rows"]
        return {row["row"]: (row["outcome"], row["environment"]["date"]) for row in rows}

    put("a", "passed", "1")
    put("b", "skipped", "1")
    put("a", "skipped", "2")
    put("b", "skipped", "2")
    assert found() == {"a": ("passed", "1"), "b": ("skipped", "2")}
    put("b", "passed", "3")
    put("a", "failed", "3")
    assert found() == {"a": ("failed", "3"), "b": ("passed", "3")}
