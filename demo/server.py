# SPDX-License-Identifier: Apache-2.0
"""The same over HTTP: ``vllm serve --enable-steering`` and the ``openai`` client."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from demo.study import SHOWN_TOKENS, Values
from demo.texts import SHOWN, STREAMED
from vllm_steer.lab import Direction
from vllm_steer.request import pack_vector

START_SECONDS = 600
STREAMED_TOKENS = 40


@contextmanager
def running_server(model: Path, log: Path, *flags: str) -> Iterator[str]:
    """Run ``vllm serve`` with steering on a free port of the loopback interface, and yield its base URL.

    Args:
        model: Folder of the model, which is served as ``demo``.
        log: File for the server's log.
        *flags: Further flags.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        Path(sys.executable).with_name("vllm"), "serve", model, "--enable-steering", "--served-model-name", "demo",
        "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--dtype", "float32", "--max-model-len", "512",
        *flags,
    ]  # fmt: skip
    # vLLM's CPU platform has set LD_PRELOAD in this process (platforms/cpu.py).
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    with log.open("w") as sink:
        server = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the server answers.

    Raises:
        RuntimeError: The server exited, or did not answer in time.
    """
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


def ask(client: OpenAI, question: str, max_tokens: int, stream: bool = False, **fields: Any) -> Any:
    """Send a chat request with fields of vllm-steer in the client's ``extra_body``."""
    return client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=stream,
        extra_body={"repetition_penalty": 1.15, **fields},
    )


def three_answers(client: OpenAI, direction: Direction, doses: tuple[float, float]) -> Values:
    """Return the answers to the first of :data:`SHOWN`, steered both ways and plain."""
    vector = pack_vector(direction.unit * direction.stream)
    texts: Values = {"prompt": SHOWN[0]}
    for name, dose in (("minus", doses[0]), ("plain", None), ("plus", doses[1])):
        site = {"post_block": {str(direction.layer): {"vector": vector, "scale": dose}}}
        fields = {} if dose is None else {"steering_vectors": site}
        texts[name] = ask(client, SHOWN[0], SHOWN_TOKENS, **fields).choices[0].message.content
    return texts


def monitor(client: OpenAI, question: str, probe: Direction, show: Callable[[str, float], None]) -> Values:
    """Stream an answer with the probe's score of each token, and call ``show`` with each piece and its score.

    A token's score comes with the event of the next token, because the model runs on it only then. The last has none.
    """
    packed = probe.probe()
    readout = {**packed, "probe": pack_vector(packed["probe"])}
    found: Values = {"prompt": question, "text": "", "scores": []}
    waiting = ""
    for chunk in ask(client, question, STREAMED_TOKENS, stream=True, readouts={"mood": readout}):
        for choice in chunk.choices:
            piece, readouts = choice.delta.content or "", getattr(choice, "readouts", None) or {}
            scores = readouts.get("mood", {}).get("values", [])
            found["text"] += piece
            found["scores"] += scores
            if scores:
                show(waiting, scores[-1])
                waiting = ""
            waiting += piece
    show(f"{waiting}\n", 0.0)
    return found


def over_http(url: str, probe: Direction, direction: Direction, doses: tuple[float, float], show: Any) -> Values:
    """Return steered answers, and streams that are scored while they are written."""
    client = OpenAI(base_url=url, api_key="none")
    texts = three_answers(client, direction, doses)
    return {**texts, "streams": [monitor(client, question, probe, show) for question in STREAMED]}
