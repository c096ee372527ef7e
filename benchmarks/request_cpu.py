# SPDX-License-Identifier: Apache-2.0
"""CPU time of the API server's process per request, with vLLM's own server code and a stand-in for the engine.

    python -m benchmarks.request_cpu --out benchmarks/results/request-cpu.json

vLLM's application, with this package's middleware, gets requests without a socket in front of it. A second process
takes its engine messages over vLLM's sockets and returns one token per request and step, with captured rows as the
engine sends them. A step starts when the server has sent all events of the last one. The model is never loaded.

* ``requests``: CPU milliseconds of the process, with all its threads, per request of 128 prompt and 128 generated
  tokens, for batches of 256 streams: the minimum of several batches. The difference to ``stock`` is what steering adds.
  ``faults``: page faults per request in the same batch.
* ``stages``: the part of each function of this package, as CPU microseconds per request without the functions that it
  calls, from further batches with timers, whose own time is subtracted.
* ``until_engine_us``: CPU microseconds of the event loop from a body to the engine message, one request at a time.
* ``floors``: CPU milliseconds that no server can avoid for one layer of 128 tokens: receiving the rows of 256 requests
  step by step over a ZMQ socket, copying them into one array per request, and writing these to a file, in plain Python.
  The memory is used again, as in a server.

Each way runs in a process of its own, because wraps apply to a whole process.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import importlib
import json
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.build import identity
from benchmarks.request_engine import LAYER, OUTPUT, PROMPT, run_engine

REQUESTS, BATCHES, SINGLE = 256, 3, 20
WAYS = ("stock", "idle", "vector", "probes", "capture")
STAGES: dict[str, tuple[str, ...]] = {
    "fields in the body": ("server.http.field_scanner:may_hold_fields", "server.http.field_scanner:find_fields"),
    "pack vectors": ("server.http.packed_bodies:pack_body",),
    "parse and compile": ("params:compile_fields", "server.http.compiled_fields:compile_json_fields"),
    "compose and check": (
        "registry.registry:SteeringRegistry.compose", "frontend.context:EngineContext.check",
        "server.http.apply_fields:apply_to_params", "frontend.requests:check_engine_request",
    ),
    "quota": (
        "server.quota.tracker:Reservation.reserve_program", "server.quota.tracker:Reservation.reserve_rows",
        "server.quota.tracker:Reservation.release",
    ),
    "state of the sample": (
        "plugin.request_state:begin_sample",
        "server.http.request_context:track_sample", "frontend.requests:count_sample",
    ),
    "reference to the program": ("params:strip_for_engine",),
    "rows received": ("frontend.outputs:take_rows",),
    "rows split by request": ("capture.row_receiver:RowReceiver.flush",),
    "end of the sample": ("frontend.sample_state:SampleState.finish_capture",),
    "consumer: assemble": ("capture.row_assembler:RowAssembler.assemble",),
    "consumer: journal": ("capture.files.journal:SubmissionJournal.add",),
    "consumer: encode": ("capture.files.stream:StreamEncoder.encode",),
    "consumer: write": ("capture.files.directory:OutputFile.append", "capture.files.directory:OutputFile.is_in_place"),
    "consumer: rest": (
        "capture.manager:CaptureManager._deliver_measured", "capture.manager:CaptureManager._begin",
        "capture.consumers.filesystem:FilesystemConsumer.accept",
    ),
    "results": ("server.http.capture_reports:encode_inline", "server.http.response_writer:_encode"),
}  # fmt: skip
"""Functions of this package by stage."""


class Timers:
    """CPU time of functions by stage, without the time of timed functions that they call."""

    def __init__(self) -> None:
        self.nanoseconds: dict[str, int] = defaultdict(int)
        self.calls: Counter[str] = Counter()
        self._inner: dict[int, list[int]] = defaultdict(lambda: [0])
        self.overhead = 0
        self.overhead = self._measure_overhead()

    def wrap(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            stack = self._inner[threading.get_ident()]
            stack.append(0)
            started = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time_ns() - started
                self.nanoseconds[stage] += spent - stack.pop()
                self.calls[stage] += 1
                stack[-1] += spent + self.overhead

        return timed

    def install(self) -> None:
        """Replace the functions of `STAGES` in every module that has imported them."""
        for stage, names in STAGES.items():
            for name in names:
                module, _, path = name.partition(":")
                holder: Any = importlib.import_module(f"vllm_steer.{module}")
                *outer, last = path.split(".")
                for part in outer:
                    holder = getattr(holder, part)
                original = getattr(holder, last)
                timed = self.wrap(stage, original)
                if outer:
                    setattr(holder, last, timed)
                    continue
                for other in list(sys.modules.values()):
                    for key, value in list(getattr(other, "__dict__", {}).items()):
                        if value is original:
                            setattr(other, key, timed)

    def clear(self) -> None:
        """Forget what was measured."""
        self.nanoseconds.clear()
        self.calls.clear()

    def _measure_overhead(self) -> int:
        timed = self.wrap("", lambda: None)
        for _ in range(1000):
            timed()
        started = time.thread_time_ns()
        for _ in range(20_000):
            timed()
        inside, self.nanoseconds[""] = self.nanoseconds[""] / 21_000, 0
        self._inner.clear()
        return int((time.thread_time_ns() - started) / 20_000 - inside)


def bodies(way: str, hidden: int) -> Iterator[bytes]:
    """Yield the body of each request of a way; each has its own prompt and, if it has one, its own vector."""
    hooks = {"hooks": {"post_block": [LAYER]}, "positions": "all_generated"}
    for number in range(1 << 30):
        rng = np.random.default_rng(number)
        body: dict[str, Any] = {
            "model": "model", "prompt": rng.integers(2, 4000, PROMPT).tolist(), "max_tokens": OUTPUT,
            "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if way == "vector":
            body["steering_vectors"] = {"post_block": {str(LAYER): rng.standard_normal(hidden).tolist()}}
        elif way == "probes":
            reduce = {"probes": [f"probes/p{i}" for i in range(16)]}
            body["capture"] = {"memory": {**hooks, "reduce": reduce}}
        elif way == "capture":
            body["capture"] = {"filesystem": hooks}
        yield json.dumps(body).encode()


class Driver:
    """Client of the application, without a socket, and the pace of the engine."""

    def __init__(self, app: Any, pace: Any) -> None:
        self._app, self._pace = app, pace
        self._chunks, self._per_step = 0, 1

    async def start(self) -> None:
        """Run the application's start, as the server does."""
        started: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        messages = [{"type": "lifespan.startup"}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            if not started.done():
                started.set_result(message)

        self._lifespan = asyncio.ensure_future(
            self._app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
        )
        if (await started)["type"] != "lifespan.startup.complete":
            raise RuntimeError(f"the application did not start: {started.result()}")

    async def post(self, path: str, body: bytes, *, tell: bool = False) -> bytes:
        """Post a body and return the response's body."""
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"", "headers": headers,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "state": {},
        }  # fmt: skip
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        received: list[bytes] = []
        status = 0

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                received.append(message.get("body", b""))
                self._chunks += 1
                if tell and self._chunks % self._per_step == 0:
                    self._pace.release()

        await self._app(scope, receive, send)
        answer = b"".join(received)
        if status != 200:
            raise RuntimeError(f"{path}: {status}: {answer[:2000]!r}")
        return answer

    async def run(self, given: list[bytes]) -> None:
        """Run streams at the same time."""
        self._chunks, self._per_step = 0, len(given)
        answers = await asyncio.gather(*(self.post("/v1/completions", body, tell=True) for body in given))
        if any(b'"completion_tokens":%d' % OUTPUT not in each or not each.endswith(b"[DONE]\n\n") for each in answers):
            raise RuntimeError(f"a stream has no end: {answers[0][-2000:]!r}")


async def measure(way: str, folder: Path, found: dict[str, Any]) -> None:
    """Measure one way in this process."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from benchmarks.serve import make_module, save_model

    if way != "stock":
        from vllm_steer.plugin.entry_point import register

        register()
    model = folder / "model"
    hidden = save_model("llama-8b", model)["hidden_size"]
    words = [str(model), "--served-model-name", "model", "--max-model-len", "1024", "--disable-uvicorn-access-log"]
    if way != "stock":
        consumer = f"filesystem:root={folder / 'rows'},layout=packed"
        words += ["--enable-steering", "--capture-consumers", consumer, "--capture-consumers", "memory"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", *words])
    validate_parsed_serve_args(args)
    context = multiprocessing.get_context("spawn")
    pace = context.Semaphore(0)
    addresses = {f"{name}_address": f"ipc://{folder}/{name}" for name in ("input", "output")}
    engine = context.Process(target=run_engine, args=(addresses, pace, hidden), daemon=True)
    engine.start()
    async with build_async_engine_client(
        args, client_config={**addresses, "client_count": 1, "client_index": 0}
    ) as llm:
        app = build_app(args, ("generate",), llm.model_config)
        await init_app_state(llm, app.state, args, ("generate",))
        driver = Driver(app, pace)
        await driver.start()
        if way == "probes":
            await driver.post("/v1/steering/modules", json.dumps(make_module(hidden, LAYER)).encode())
        each = bodies(way, hidden)
        await driver.run([next(each) for _ in range(REQUESTS)])
        gc.collect()
        gc.freeze()  # as vLLM does
        runs = [await spend(driver, [next(each) for _ in range(REQUESTS)]) for _ in range(BATCHES)]
        found["milliseconds"], found["faults"] = min(runs)
        found["batches"] = [spent for spent, _ in runs]
        found["until_engine_us"] = await until_engine(driver, llm, [next(each) for _ in range(SINGLE)])
        if way != "stock":
            timers = Timers()
            timers.install()
            await driver.run([next(each) for _ in range(REQUESTS)])
            timers.clear()
            await driver.run([next(each) for _ in range(REQUESTS)])
            found["stages"] = {
                stage: round(timers.nanoseconds[stage] / 1000 / REQUESTS, 1) for stage in STAGES if timers.calls[stage]
            }
    engine.kill()


async def spend(driver: Driver, given: list[bytes]) -> tuple[float, float]:
    """Run a batch; return the CPU milliseconds and the page faults of this process per request."""
    faults, started = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
    await driver.run(given)
    spent = time.process_time() - started
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return round(1000 * spent / len(given), 3), round(faults / len(given), 1)


async def until_engine(driver: Driver, llm: Any, given: list[bytes]) -> float:
    """Return the median microseconds of the event loop from a body until the engine message is sent."""
    spent: list[float] = []
    original = type(llm.engine_core)._send_input_message
    started = 0.0

    def timed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        spent.append(1e6 * (time.thread_time() - started))
        return result

    type(llm.engine_core)._send_input_message = timed
    for body in given:
        await asyncio.sleep(0.01)
        started = time.thread_time()
        await driver.run([body])
    type(llm.engine_core)._send_input_message = original
    return round(statistics.median(spent), 1)


def send_rows(address: str, pace: Any, size: int) -> None:
    """Send the rows of each step of three batches."""
    import zmq

    socket = zmq.Context().socket(zmq.PUSH)
    socket.connect(address)
    rows = np.random.default_rng(0).integers(0, 60, REQUESTS * size, dtype=np.uint8)
    for _ in range(3 * (OUTPUT - 1)):
        pace.acquire()
        socket.send_multipart([b"step", rows], copy=False)
    socket.close()


def measure_floors(pipe: Any) -> None:
    """Send the CPU milliseconds per request of receiving, copying and writing rows in plain Python."""
    import zmq

    from vllm_steer.server.allocator import keep_freed_memory

    keep_freed_memory()
    size = 2 * 4096
    context = multiprocessing.get_context("spawn")
    pace = context.Semaphore(0)
    found: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as name:
        socket = zmq.Context(io_threads=2).socket(zmq.PULL)
        socket.bind(f"ipc://{name}/socket")
        sender = context.Process(target=send_rows, args=(f"ipc://{name}/socket", pace, size), daemon=True)
        sender.start()
        for number in range(3):
            received = copied = 0.0
            whole = [np.empty((OUTPUT - 1, size), np.uint8) for _ in range(REQUESTS)]
            for each in whole:
                each[:] = 1
            for step in range(OUTPUT - 1):
                started = time.process_time()
                pace.release()
                rows = np.frombuffer(socket.recv_multipart(copy=False)[1].buffer, np.uint8).reshape(REQUESTS, size)
                received += time.process_time() - started
                started = time.process_time()
                for sample, row in zip(whole, rows, strict=True):
                    sample[step] = row
                copied += time.process_time() - started
            file = os.open(f"{name}/{number}", os.O_RDWR | os.O_CREAT)
            started = time.process_time()
            for i, sample in enumerate(whole):
                os.pwrite(file, sample, i * sample.nbytes)
            written = time.process_time() - started
            os.close(file)
            os.unlink(f"{name}/{number}")
            found.append((received, copied, written))
        sender.join()
    least = [round(1000 * min(times) / REQUESTS, 3) for times in zip(*found, strict=True)]
    pipe.send(dict(zip(("receive", "copy", "write"), least, strict=True)))


def run_way(way: str, pipe: Any) -> None:
    """Measure one way in a child process and send what was found."""
    import uvloop

    os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if way == "stock":
        os.environ["VLLM_PLUGINS"] = "none"
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        uvloop.run(measure(way, Path(name), found))
    pipe.send(found)


def in_process(target: Callable[..., None], *args: Any) -> Any:
    """Run a function in a child process and return what it sent."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*args, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    arguments = parser.parse_args()
    environment = {"cpus": os.cpu_count(), "load_average": os.getloadavg(), "machine": platform.machine(), **identity()}
    result: dict[str, Any] = {"environment": environment, "requests": {}, "floors": in_process(measure_floors)}
    print(json.dumps(result["floors"]), flush=True)
    for way in arguments.ways:
        result["requests"][way] = found = in_process(run_way, way)
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        print(way, json.dumps(found), flush=True)
        stock = result["requests"].get("stock")
        if stock is not None:
            found["added_ms"] = round(found["milliseconds"] - stock["milliseconds"], 3)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
