# SPDX-License-Identifier: Apache-2.0
"""Processes that begin with vLLM imported, which takes eight seconds.

They are forks of a process that has imported it and done nothing else (``multiprocessing``'s fork server).
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

PRELOADED = ("vllm_steer.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama")


class Ended(NamedTuple):
    """How a process ended, with the names of ``subprocess.CompletedProcess``."""

    returncode: int | None
    stdout: str
    stderr: str


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def run_warm(code: str, *, environment: Mapping[str, str], folder: str, outputs: Path, timeout: float = 280.0) -> Ended:
    """Run code as the main part of a process.

    Args:
        code: The code.
        environment: All environment variables of the process.
        folder: Its working directory.
        outputs: Folder for files with its output.
        timeout: Seconds after which it is killed.
    """
    files = outputs / "stdout", outputs / "stderr"
    process = _context().Process(target=_run, args=(code, dict(environment), folder, *map(str, files)))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
    stdout, stderr = (file.read_text() if file.exists() else "" for file in files)
    return Ended(process.exitcode, stdout, stderr)


def _run(code: str, environment: dict[str, str], folder: str, stdout: str, stderr: str) -> None:
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["main"]
    try:
        exec(compile(code, "main", "exec"), {"__name__": "__main__"})  # noqa: S102
    finally:
        atexit._run_exitfuncs()  # which a fork would leave out
        sys.stdout.flush()
