# SPDX-License-Identifier: Apache-2.0
"""A ``vllm serve`` process of a benchmark: its start time, its key-value cache and the CPU seconds of its processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

START_SECONDS = 600
# Part of a process title or command line -> the name of the process in results. The root process is the API server.
PROCESSES = {
    "EngineCore": "engine core",
    "APIServer": "api server",
    "Worker": "worker",
    "resource_tracker": "resource tracker",
}
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_GIB = re.compile(r"Available KV cache memory: ([\d.]+) GiB")


def free_port() -> int:
    """Return a free port below those that the system gives to outgoing connections.

    A server binds its port many seconds later. A port of the system's range may then belong to a connection.
    """
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("none of 100 ports between 10000 and 32000 is free")


def cpu_seconds(root: int) -> dict[str, float]:
    """Return the CPU seconds of a server's processes by name; processes with the same name are added up."""
    spent: dict[str, float] = {}
    parent = psutil.Process(root)
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            title = f"{process.name()} {' '.join(process.cmdline())}"
            times = process.cpu_times()
            name = next((name for part, name in PROCESSES.items() if part in title), "other")
            name = "api server" if process.pid == root else name
            spent[name] = spent.get(name, 0.0) + times.user + times.system
    return spent


def read_cache(log: str) -> dict[str, Any]:
    """Return the size of the key-value cache, in tokens and GiB, from a server's log."""
    found: dict[str, Any] = {}
    if match := _TOKENS.search(log):
        found["cache_tokens"] = int(match[1].replace(",", ""))
    if match := _GIB.search(log):
        found["cache_gib"] = float(match[1])
    return found


class ServerProcess:
    """A running ``vllm serve``, which is killed with its children at the end of the context."""

    model_name = "model"

    def __init__(
        self,
        model: Path,
        options: Sequence[str],
        log: Path,
        caches: Path,
        *,
        plugin: bool,
        env: dict[str, str] | None = None,
    ) -> None:
        """Start the server. ``plugin``: whether vLLM loads its plug-ins, among them this project's."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *options]
        command += ["--served-model-name", self.model_name, "--host", "127.0.0.1", "--port", str(port)]
        settings = {
            **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            **{name: str(caches / name.lower()) for name in CACHES}, **(env or {}),
        }  # fmt: skip
        settings.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        if not plugin:
            settings["VLLM_PLUGINS"] = "none"  # not the name of a plug-in, so none is loaded
        self._started = time.monotonic()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=settings, start_new_session=True
            )

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def log_tail(self, size: int = 3000) -> str:
        return self._log.read_text(errors="replace")[-size:]

    def wait_until_ready(self) -> dict[str, Any]:
        """Wait for the server's health check and return the seconds of its start and the size of its cache."""
        while self.process.poll() is None and time.monotonic() < self._started + START_SECONDS:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    seconds = time.monotonic() - self._started
                return {"start_seconds": round(seconds, 1), **read_cache(self._log.read_text(errors="replace"))}
            time.sleep(0.2)
        raise RuntimeError(f"The server did not start: {self.log_tail()}")

    def post(self, path: str, body: object) -> None:
        """Send a JSON body. Raises ``RuntimeError`` with the server's answer if it refuses the body."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            urllib.request.urlopen(request).close()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.read().decode()}") from error
