# SPDX-License-Identifier: Apache-2.0
"""Measure the transfer of captured rows between processes, compared with a handle into shared memory.

    python benchmarks/process_hops.py --out benchmarks/results/process-hops.json

Each hop has two processes and vLLM's own transport:

* ``worker``: the shared-memory ring from a worker process to the engine (unused if the worker runs in the engine's
  process).
* ``front end``: vLLM's message over a ZMQ socket from the engine to the API process.
* ``handle``: an alternative to both. The sender copies the rows into a file in ``/dev/shm`` and sends its name; the
  receiver maps the file.

A step has the bfloat16 rows of 32 requests to a model of width 4,096: one layer, 32 layers, or a prefill of 8 tokens at
32 layers. Times are medians over the steps, from the start of sending until the receiver confirms that it has read
every byte.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import zmq
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_steer.capture.step_rows import RowIndex, StepRows
from vllm_steer.engine.model_output import ROWS_ATTRIBUTE
from vllm_steer.engine.row_sender import RowSender

REQUESTS, ROW_BYTES, STEPS = 32, 4096 * 2, 12
STEPS_OF: dict[str, tuple[int, int]] = {
    "decode, one layer": (1, 1),
    "decode, 32 layers": (1, 32),
    "prefill of 8 tokens, 32 layers": (8, 32),
}
"""Tokens per request and number of layers, by name."""


def make_step(tokens: int, layers: int) -> StepRows:
    """Return the rows of a step as a worker sends them."""
    codes = tuple(range(layers))
    index = RowIndex(tuple(f"request-{i}" for i in range(REQUESTS)), (codes,) * REQUESTS)
    count = np.full(REQUESTS, tokens, dtype=np.int64)
    rows = np.frombuffer(os.urandom(REQUESTS * tokens * layers * ROW_BYTES), dtype=np.uint8).reshape(-1, ROW_BYTES)
    return StepRows(index, np.zeros_like(count), count, rows)


def read_all(rows: Any) -> int:
    """Read all bytes once, as the assembly of rows does."""
    return int(np.frombuffer(rows, dtype=np.uint64).sum())


def receive(kind: str, endpoint: Any, replies: Any) -> None:
    """Read each step in the receiving process and confirm it."""
    read_step = RECEIVERS[kind](endpoint)
    replies.put("ready")
    for _ in range(STEPS * len(STEPS_OF)):
        read_step()
        replies.put("read")


def _from_queue(handle: Any) -> Callable[[], None]:
    queue = MessageQueue.create_from_handle(handle, 0)
    queue.wait_until_ready()

    def read_step() -> None:
        read_all(queue.dequeue().rows)

    return read_step


def _from_socket(address: str) -> Callable[[], None]:
    socket = zmq.Context().socket(zmq.PULL)
    socket.connect(address)
    decoder = MsgpackDecoder(EngineCoreOutputs)

    def read_step() -> None:
        for output in decoder.decode(socket.recv_multipart(copy=False)).outputs:
            read_all(output.routed_experts)

    return read_step


def _from_memory(address: str) -> Callable[[], None]:
    socket = zmq.Context().socket(zmq.PULL)
    socket.connect(address)

    def read_step() -> None:
        name = socket.recv_string()
        with open(name, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            read_all(memory)
        os.unlink(name)

    return read_step


RECEIVERS: dict[str, Callable[[Any], Callable[[], None]]] = {
    "worker": _from_queue,
    "front end": _from_socket,
    "handle": _from_memory,
}


def measure(kind: str, steps: list[StepRows]) -> list[float]:
    """Return the median milliseconds of each step over one hop."""
    context = multiprocessing.get_context("spawn")
    replies = context.Queue()
    spent: list[list[float]] = [[] for _ in steps]
    with tempfile.TemporaryDirectory() as folder:
        if kind == "worker":
            queue = MessageQueue(1, 1)
            endpoint: Any = queue.export_handle()
            send = _to_queue(queue)
        else:
            endpoint = f"ipc://{folder}/hop"
            socket = zmq.Context().socket(zmq.PUSH)
            socket.bind(endpoint)
            send = _to_socket(socket) if kind == "front end" else _to_memory(socket)
        process = context.Process(target=receive, args=(kind, endpoint, replies))
        process.start()
        if kind == "worker":
            queue.wait_until_ready()
        replies.get()
        for step, times in zip(steps, spent, strict=True):
            for _ in range(STEPS):
                started = time.perf_counter()
                send(step)
                replies.get()
                times.append(time.perf_counter() - started)
        process.join()
    return [1000 * statistics.median(times[2:]) for times in spent]


def _to_queue(queue: Any) -> Callable[[StepRows], Any]:
    return queue.enqueue  # type: ignore[no-any-return]


def _to_socket(socket: Any) -> Callable[[StepRows], Any]:
    encoder, requests = MsgpackEncoder(), {f"request-{i}": SimpleNamespace(client_index=0) for i in range(REQUESTS)}

    def send(step: StepRows) -> None:
        row_sender, outputs = RowSender(), {0: EngineCoreOutputs()}
        row_sender.collect(SimpleNamespace(**{ROWS_ATTRIBUTE: (step,)}), requests)
        row_sender.attach_to(outputs)
        socket.send_multipart(encoder.encode(outputs[0]), copy=False)

    return send


def _to_memory(socket: Any) -> Callable[[StepRows], None]:
    def send(step: StepRows) -> None:
        descriptor, name = tempfile.mkstemp(dir="/dev/shm")
        with open(descriptor, "wb") as file:
            file.write(step.rows.data)
        socket.send_string(name)

    return send


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    steps = [make_step(tokens, layers) for tokens, layers in STEPS_OF.values()]
    measured = {kind: measure(kind, steps) for kind in RECEIVERS}
    results = {}
    for number, (name, step) in enumerate(zip(STEPS_OF, steps, strict=True)):
        size = step.rows.nbytes
        milliseconds = {kind: times[number] for kind, times in measured.items()}
        rates = {kind: size / 1e6 / spent for kind, spent in milliseconds.items()}
        results[name] = {"mib": size / 2**20, "milliseconds": milliseconds, "gb_per_s": rates}
        print(name, results[name])
    environment = {
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    arguments.out.write_text(json.dumps({"environment": environment, "steps": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
