# SPDX-License-Identifier: Apache-2.0
"""Outcomes of the newest models: their processes, and the file that collects them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from benchmarks.build import ROOT
from tests.conformance.frontier_rows import FRONTIER, PACKAGES

NEEDS: Mapping[str, tuple[str, ...]] = {str(row): row.needs for row in FRONTIER}
PROGRAM: Final = "import sys; from tests.gpu.frontier import write_outcome; write_outcome(*sys.argv[1:])"
"""Not a module: multiprocessing would import it in the process of HF Transformers, which must not load vLLM."""
NO_DEEP_GEMM: Final = "requires DeepGEMM"
"""Part of vLLM's message without DeepGEMM."""
Outcome = dict[str, Any]


def is_installed(module: str) -> bool:
    """Return whether a module of kernels is installed, by itself or in vLLM's wheel."""
    for name in (module, f"vllm.third_party.{module}"):
        with contextlib.suppress(ModuleNotFoundError):
            if find_spec(name) is not None:
                return True
    return False


def missing_package(error: BaseException) -> str | None:
    """Return the reason to skip a model if an error comes from a kernel's package that is not installed."""
    seen: BaseException | None = error
    while seen is not None:
        if NO_DEEP_GEMM in str(seen):
            return f"needs {PACKAGES['deep_gemm']}"
        if isinstance(seen, ModuleNotFoundError) and (seen.name or "").partition(".")[0] in PACKAGES:
            return f"needs {PACKAGES[str(seen.name).partition('.')[0]]}"
        seen = seen.__cause__ or seen.__context__
    return None


def run_model(name: str, folder: Path, seconds: float, command: Sequence[str] = ()) -> Outcome:
    """Examine a model in a process of its own, and return its outcome; a process that dies or hangs has failed.

    Args:
        name: The model.
        folder: Where the process writes its outcome and its log.
        seconds: The time limit; the process and its children are then killed.
        command: The command to run instead of ``PROGRAM``.
    """
    if missing := [PACKAGES[module] for module in NEEDS.get(name, ()) if not is_installed(module)]:
        return {"row": name, "outcome": "skipped", "reason": f"needs {', '.join(missing)}"}
    out, log = folder / f"{name}.json", folder / f"{name}.log"
    out.unlink(missing_ok=True)
    command = command or (sys.executable, "-c", PROGRAM)
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, name, str(out)], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
    try:
        ended = f"exit status {process.wait(seconds)}"
    except subprocess.TimeoutExpired:
        ended = f"killed after {seconds:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if out.exists():
        found: Outcome = json.loads(out.read_text())
        return found
    return {"row": name, "outcome": "failed", "error": [*log.read_text().splitlines()[-25:], ended]}


def store(outcome: Outcome, path: Path, environment: Mapping[str, Any]) -> None:
    """Replace the outcome of a model in a file, which other processes may change at the same time.

    Each outcome has the environment of its own run. A skipped model keeps its earlier outcome.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        rows: dict[str, Outcome] = {}
        if path.exists():
            rows = {row["row"]: row for row in json.loads(path.read_text())["rows"]}
        if outcome["outcome"] != "skipped" or rows.get(outcome["row"], outcome)["outcome"] == "skipped":
            rows[outcome["row"]] = {**outcome, "environment": environment}
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"rows": list(rows.values())}, indent=1) + "\n")
        new.replace(path)
    finally:
        os.close(folder)
