# SPDX-License-Identifier: Apache-2.0
"""Time of captured rows on their way through the processes, per captured request and step, on a CPU.

    python benchmarks/assembly.py --out benchmarks/results/assembly.json

Measured without a model: 64 requests that decode one token each and read one layer, or all 32, or 16 probes at 4
layers, of a model 4,096 wide. ``worker`` makes a step's rows its own when they have arrived, ``engine`` passes them on
and encodes the message, ``arrive`` decodes and keeps it, ``assemble`` makes each request's tensors of what it has when
all have ended. The first two can delay the engine's next step, the others cannot.

``ending`` is what the outputs of a step take in which 256 such requests end and are handed to their consumer:
milliseconds, median of several such steps. Nothing else of the outputs' way is there. *At once*: the consumer's thread
starts as it would without :meth:`CaptureManager.pause_consumers`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_steer.capture.manager import CaptureManager
from vllm_steer.capture.row_assembler import RowAssembler
from vllm_steer.capture.row_receiver import RowReceiver
from vllm_steer.capture.step_plan import SteadyCaptureBatch
from vllm_steer.config import SteeringConfig
from vllm_steer.engine.capabilities import Capabilities
from vllm_steer.engine.device_to_host import DeviceToHostCopier, PendingRows, Transfer
from vllm_steer.engine.model_output import ROWS_ATTRIBUTE
from vllm_steer.engine.row_sender import RowSender
from vllm_steer.program import compile_program, resolve
from vllm_steer.spec import CaptureSpec, Projection

LAYERS, HIDDEN, REQUESTS, STEPS = 32, 4096, 64, 50
ENDING, ROUNDS = 256, 5


def decoding(layers: Any, reduce: Projection | None, count: int) -> tuple[CaptureSpec, SteadyCaptureBatch]:
    """A batch of ``count`` requests that all read the same."""
    spec = CaptureSpec(hooks={"post_block": layers}, positions="all", reduce=reduce)
    (last,) = resolve(compile_program([], [spec]), 10, LAYERS).segments
    return spec, SteadyCaptureBatch(tuple(f"request-{i}" for i in range(count)), (last.program,) * count)


def measure(layers: Any, reduce: Projection | None = None) -> dict[str, float]:
    """Microseconds per captured request and step of each place."""
    spec, steady = decoding(layers, reduce, REQUESTS)
    names, one = steady.request_ids, np.ones(REQUESTS, dtype=np.int64)
    arena = torch.zeros(steady.plan(one, one).num_rows, HIDDEN, dtype=torch.bfloat16)
    directions = None if reduce is None else torch.from_numpy(reduce.directions.copy())
    requests = {name: SimpleNamespace(client_index=0) for name in names}
    outbox, inbox = RowSender(), RowReceiver()
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    assemblers = {name: RowAssembler(LAYERS, HIDDEN, torch.bfloat16) for name in names}
    for name, assembler in assemblers.items():
        inbox.add_request(name, assembler)
    spent: dict[str, list[float]] = {"worker": [], "engine": [], "arrive": []}
    for step in range(STEPS):
        plan = steady.plan(one * (10 + step), one)
        forms = tuple(Transfer(each.index.projection, each.arena_rows, directions) for each in plan.streams)
        on_the_way = DeviceToHostCopier(arena.device).start(arena, None, plan, forms)
        began = time.perf_counter()
        arrived = PendingRows(plan, on_the_way.rows, release=lambda: None).wait()
        owned = time.perf_counter()
        outbox.collect(SimpleNamespace(**{ROWS_ATTRIBUTE: arrived}), requests)
        outputs = {0: EngineCoreOutputs()}
        outbox.attach_to(outputs)
        message = encoder.encode(outputs[0])
        passed = time.perf_counter()
        # What a socket delivers is in memory of its own.
        received = [bytes(frame) for frame in message]
        delivered = time.perf_counter()
        inbox.receive(decoder.decode(received).outputs)
        kept = time.perf_counter()
        for name, seconds in zip(spent, (owned - began, passed - owned, kept - delivered), strict=True):
            spent[name].append(seconds * 1e6 / REQUESTS)
    began = time.perf_counter()
    for name, assembler in assemblers.items():
        inbox.finish_request(name)
        assembler.assemble(spec, 10, 10 + STEPS + 1)
    assembled = (time.perf_counter() - began) * 1e6 / REQUESTS / STEPS
    # The mean: most of what the front end does happens in the few steps in which rows are split off.
    return {name: statistics.mean(values) for name, values in spent.items()} | {"assemble": assembled}


def ending(layers: Any, reduce: Projection | None, *, at_once: bool) -> float:
    """Milliseconds of one step in which all requests end."""
    spec, steady = decoding(layers, reduce, ENDING)
    names, one = steady.request_ids, np.ones(ENDING, dtype=np.int64)
    desk = CaptureManager(Capabilities(LAYERS, HIDDEN, 4096, "bfloat16", {}, SteeringConfig()), "a model", {})
    specs = (("memory", spec),)
    spent = []
    for _ in range(ROUNDS):
        inbox, outbox = RowReceiver(), RowSender()
        assemblers = {name: desk.new_assembler() for name in names}
        for name, assembler in assemblers.items():
            inbox.add_request(name, assembler)
        for step in range(STEPS):
            plan = steady.plan(one * (10 + step), one)
            rows = {
                each.index.projection: torch.zeros(plan.num_rows, 2 * HIDDEN if reduce is None else 4 * 16).byte()
                for each in plan.streams
            }
            outbox.collect(
                SimpleNamespace(**{ROWS_ATTRIBUTE: PendingRows(plan, rows).wait()}),
                {name: SimpleNamespace(client_index=0) for name in names},
            )
            outputs: dict[int, Any] = {}
            outbox.attach_to(outputs)
            inbox.receive(outputs[0].outputs)
        results = []
        began = time.perf_counter()
        with nullcontext() if at_once else desk.pause_consumers():
            for name, assembler in assemblers.items():
                inbox.finish_request(name)
                results.append(
                    desk.submit(
                        assembler, specs, request_id=name, sample=0, prompt_token_ids=(1,) * 10,
                        output_token_ids=(1,) * (STEPS + 1),
                    )
                )  # fmt: skip
        spent.append(1000 * (time.perf_counter() - began))
        for each in results:
            if each["memory"].status == "error":
                raise RuntimeError(each["memory"].error)
    desk.close()
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    probes = Projection(np.random.default_rng(0).standard_normal((16, HIDDEN)).astype("f4"))
    cases: dict[str, tuple[Any, Projection | None]] = {
        "one layer": ([16], None),
        "32 layers": ("all", None),
        "16 probes at 4 layers": ([0, 8, 16, 24], probes),
    }
    result = {
        "environment": {
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg(),
            "machine": platform.machine(),
            "torch": torch.__version__,
        },
        "microseconds_per_request_and_step": {name: measure(*case) for name, case in cases.items()},
        "ending_milliseconds": {
            name: {"held back": ending(*cases[name], at_once=False), "at once": ending(*cases[name], at_once=True)}
            for name in ("one layer", "16 probes at 4 layers")
        },
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: found for name, found in result.items() if name != "environment"}, indent=1))


if __name__ == "__main__":
    main()
