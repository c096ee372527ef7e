# SPDX-License-Identifier: Apache-2.0
"""The same edit over HTTP: a server process and the ``openai`` client."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from openai import OpenAI

from vllm_steer.request import pack_vector

START_SECONDS = 180


@contextmanager
def running_server(model_folder: Path, log: Path) -> Iterator[str]:
    """Run ``vllm-steer serve`` on a free port of the loopback interface, and yield its base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm_steer.cli.main", "serve", str(model_folder), "--served-model-name", "demo",
        "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--dtype", "float32", "--max-model-len", "512",
    ]  # fmt: skip
    # vLLM's CPU platform has set LD_PRELOAD in this process (platforms/cpu.py).
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    with log.open("w") as sink:
        server = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
        try:
            _wait_until_healthy(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"The server exited during startup; see {log}")
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"The server was not ready after {START_SECONDS} s; see {log}")


def complete(base_url: str, prompt: str, vector: np.ndarray | None, layer: int, strength: float) -> str:
    """Return one completion. The client's ``extra_body`` carries the steering fields."""
    extra: dict[str, Any] = {}
    if vector is not None:
        site = {"vector": pack_vector(vector), "scale": strength}
        extra["steering_vectors"] = {"post_block": {str(layer): site}}
    client = OpenAI(base_url=base_url, api_key="none")
    answer = client.completions.create(
        model="demo", prompt=prompt, max_tokens=48, temperature=0.8, seed=1, extra_body=extra
    )
    return str(answer.choices[0].text)
