# SPDX-License-Identifier: Apache-2.0
"""Processes that begin with vLLM imported, which takes ten seconds of a core.

They are forks of a process that has imported it and done nothing else (``multiprocessing``'s fork server). A test of
the start itself, or of a process that must not import vLLM, starts a Python instead.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PRELOADED = (
    "vllm_steer.llm", "vllm_steer.server.lifespan", "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama", "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve", "vllm.entrypoints.launchers.app",
    "vllm.entrypoints.openai.chat_completion.serving", "vllm.entrypoints.openai.completion.serving",
)  # fmt: skip
RUN_MODULE = "import runpy, sys; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"


class Ended(NamedTuple):
    """How a process ended, with the names of ``subprocess.CompletedProcess``."""

    returncode: int | None
    stdout: str
    stderr: str


class WarmProcess(ForkServerProcess):
    """A process with the environment that its parent has when it starts, as of ``spawn``."""

    environment: Mapping[str, str] | None = None

    def start(self) -> None:
        self.environment = dict(self.environment or os.environ)
        super().start()

    def __reduce__(self) -> Any:
        return _restore, (self.environment, bytes(ForkingPickler.dumps(vars(self))))

    # The rest of what a caller of ``subprocess.Popen`` uses.

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout or 0.0)
        return self.exitcode


def _restore(environment: Mapping[str, str], state: bytes) -> WarmProcess:
    """Return the process; set its variables first, which modules may read that are imported for its arguments."""
    os.environ.clear()
    os.environ.update(environment)
    process = WarmProcess.__new__(WarmProcess)
    vars(process).update(pickle.loads(state))  # noqa: S301 (written by this process's parent)
    return process


class WarmContext(ForkServerContext):
    Process = WarmProcess


@cache
def context() -> WarmContext:
    found = WarmContext()
    found.set_forkserver_preload(list(PRELOADED))
    return found


def warm_workers(patch: pytest.MonkeyPatch) -> None:
    """Let vLLM start the processes of in-process engines with :class:`WarmProcess` instead of a new Python."""
    for module in ("v1.executor.multiproc_executor", "v1.engine.utils", "v1.engine.coordinator"):
        patch.setattr(f"vllm.{module}.get_mp_context", context)


def start_warm(
    code: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, files: Sequence[Path]
) -> WarmProcess:
    """Start code as the main part of a process that leads a process group.

    Args:
        code: The code.
        arguments: ``sys.argv``.
        environment: All environment variables of the process.
        folder: Its working directory.
        files: Files for stdout and stderr, and one that is read as stdin.
    """
    process = context().Process(target=_run, args=(code, list(arguments), str(folder), list(map(str, files))))
    process.environment = environment
    process.start()
    return process


def run_warm(
    code: str, *arguments: str, environment: Mapping[str, str], folder: Path, stdin: str = "", timeout: float = 280.0
) -> Ended:
    """Run code, see :func:`start_warm`; kill it after ``timeout`` seconds."""
    with tempfile.TemporaryDirectory() as outputs:
        files = [Path(outputs, name) for name in ("stdout", "stderr", "stdin")]
        files[2].write_text(stdin)
        process = start_warm(code, arguments, environment, folder, files)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
        stdout, stderr = (file.read_text() if file.exists() else "" for file in files[:2])
    return Ended(process.exitcode, stdout, stderr)


def _run(code: str, arguments: list[str], folder: str, files: list[str]) -> None:
    os.setsid()
    multiprocessing.current_process().name = "MainProcess"
    for number, path in enumerate(files[:2], 1):
        output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(output, number)
    sys.stdin = open(files[2])  # noqa: SIM115
    os.chdir(folder)
    sys.argv = arguments or ["main"]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(code, "main", "exec"), namespace)  # noqa: S102
    finally:
        atexit._run_exitfuncs()  # which a fork would leave out
        sys.stdout.flush()
