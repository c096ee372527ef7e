# SPDX-License-Identifier: Apache-2.0
"""What captured rows cost on their way between processes, against the same rows by a handle into shared memory.

    python benchmarks/process_hops.py --out benchmarks/results/process-hops.json

Two hops are measured, each with two real processes and vLLM's own transport: ``worker`` is the ring of shared memory
through which a multi-process executor's worker answers (none where the worker is the engine's own process), and
``front end`` is vLLM's message over a ZMQ socket, from the engine to the process that took the request. ``handle`` is
what a handle would take in the place of either: one copy into a file of ``/dev/shm``, its name sent, mapped and read
once.

A step is 32 requests' rows of a model 4,096 wide in bfloat16: one layer, 32 layers, and a prefill of 8 tokens at 32
layers. Times are medians over the steps, from the start of sending until the receiver has read every byte and said so.
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
"""Tokens per request, and layers."""


def step_of(tokens: int, layers: int) -> StepRows:
    """A step as a worker hands it over."""
    codes = tuple(range(layers))
    entries = RowIndex(tuple(f"request-{i}" for i in range(REQUESTS)), (codes,) * REQUESTS)
    count = np.full(REQUESTS, tokens, dtype=np.int64)
    rows = np.frombuffer(os.urandom(REQUESTS * tokens * layers * ROW_BYTES), dtype=np.uint8).reshape(-1, ROW_BYTES)
    return StepRows(entries, np.zeros_like(count), count, rows)


def read_all(rows: Any) -> int:
    """One pass over the bytes, as assembly makes."""
    return int(np.frombuffer(rows, dtype=np.uint64).sum())


def receive(kind: str, where: Any, answers: Any) -> None:
    """The receiving process: reads each step and answers."""
    take = RECEIVERS[kind](where)
    answers.put("ready")
    for _ in range(STEPS * len(STEPS_OF)):
        take()
        answers.put("read")


def _from_queue(handle: Any) -> Callable[[], None]:
    queue = MessageQueue.create_from_handle(handle, 0)
    queue.wait_until_ready()

    def take() -> None:
        read_all(queue.dequeue().rows)

    return take


def _from_socket(address: str) -> Callable[[], None]:
    socket = zmq.Context().socket(zmq.PULL)
    socket.connect(address)
    decoder = MsgpackDecoder(EngineCoreOutputs)

    def take() -> None:
        for output in decoder.decode(socket.recv_multipart(copy=False)).outputs:
            read_all(output.routed_experts)

    return take


def _from_memory(address: str) -> Callable[[], None]:
    socket = zmq.Context().socket(zmq.PULL)
    socket.connect(address)

    def take() -> None:
        name = socket.recv_string()
        with open(name, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            read_all(memory)
        os.unlink(name)

    return take


RECEIVERS: dict[str, Callable[[Any], Callable[[], None]]] = {
    "worker": _from_queue,
    "front end": _from_socket,
    "handle": _from_memory,
}


def measure(kind: str, steps: list[StepRows]) -> list[float]:
    """Milliseconds of each of the steps over one hop."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    spent: list[list[float]] = [[] for _ in steps]
    with tempfile.TemporaryDirectory() as folder:
        if kind == "worker":
            queue = MessageQueue(1, 1)
            where: Any = queue.export_handle()
            send = _to_queue(queue)
        else:
            where = f"ipc://{folder}/hop"
            socket = zmq.Context().socket(zmq.PUSH)
            socket.bind(where)
            send = _to_socket(socket) if kind == "front end" else _to_memory(socket)
        process = context.Process(target=receive, args=(kind, where, answers))
        process.start()
        if kind == "worker":
            queue.wait_until_ready()
        answers.get()
        for step, times in zip(steps, spent, strict=True):
            for _ in range(STEPS):
                started = time.perf_counter()
                send(step)
                answers.get()
                times.append(time.perf_counter() - started)
        process.join()
    return [1000 * statistics.median(times[2:]) for times in spent]


def _to_queue(queue: Any) -> Callable[[StepRows], Any]:
    return queue.enqueue  # type: ignore[no-any-return]


def _to_socket(socket: Any) -> Callable[[StepRows], Any]:
    encoder, requests = MsgpackEncoder(), {f"request-{i}": SimpleNamespace(client_index=0) for i in range(REQUESTS)}

    def send(step: StepRows) -> None:
        outbox, outputs = RowSender(), {0: EngineCoreOutputs()}
        outbox.collect(SimpleNamespace(**{ROWS_ATTRIBUTE: (step,)}), requests)
        outbox.attach_to(outputs)
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
    made = [step_of(tokens, layers) for tokens, layers in STEPS_OF.values()]
    measured = {kind: measure(kind, made) for kind in RECEIVERS}
    steps = {}
    for number, (name, step) in enumerate(zip(STEPS_OF, made, strict=True)):
        size = step.rows.nbytes
        milliseconds = {kind: times[number] for kind, times in measured.items()}
        rates = {kind: size / 1e6 / spent for kind, spent in milliseconds.items()}
        steps[name] = {"mib": size / 2**20, "milliseconds": milliseconds, "gb_per_s": rates}
        print(name, steps[name])
    environment = {
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    arguments.out.write_text(json.dumps({"environment": environment, "steps": steps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
