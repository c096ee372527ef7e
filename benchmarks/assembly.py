# SPDX-License-Identifier: Apache-2.0
"""CPU time for transferring captured rows between the processes, per captured request and step.

    python benchmarks/assembly.py --out benchmarks/results/assembly.json

No model runs. 64 requests decode one token per step and capture one layer, all 32 layers, or 16 probes at 4 layers,
with hidden size 4,096. ``worker`` copies the rows of a step after they arrive, ``engine`` forwards them and encodes the
message, ``arrive`` decodes and stores the message, and ``assemble`` builds the tensors of finished requests. The
first two stages can delay the engine's next step.

``ending`` is the time to process the outputs of a step in which 256 such requests finish and are passed to their
consumer, in milliseconds, as the median of several steps. *At once*: the consumer's thread starts immediately, as it
would without :meth:`CaptureManager.pause_consumers`.
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

from benchmarks.build import identity
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
from vllm_steer.request import CaptureSpec, Projection

LAYERS, HIDDEN, REQUESTS, STEPS = 32, 4096, 64, 50
FINISHED, ROUNDS = 256, 5


def make_batch(layers: Any, reduce: Projection | None, count: int) -> tuple[CaptureSpec, SteadyCaptureBatch]:
    """Return a batch of ``count`` requests with the same capture."""
    spec = CaptureSpec(hooks={"post_block": layers}, positions="all", reduce=reduce)
    (last,) = resolve(compile_program([], [spec]), 10, LAYERS).segments
    return spec, SteadyCaptureBatch(tuple(f"request-{i}" for i in range(count)), (last.program,) * count)


def measure(layers: Any, reduce: Projection | None = None) -> dict[str, float]:
    """Return microseconds per captured request and step, for each stage."""
    spec, steady = make_batch(layers, reduce, REQUESTS)
    names, one = steady.request_ids, np.ones(REQUESTS, dtype=np.int64)
    arena = torch.zeros(steady.plan(one, one).num_rows, HIDDEN, dtype=torch.bfloat16)
    directions = None if reduce is None else torch.from_numpy(reduce.directions.copy())
    requests = {name: SimpleNamespace(client_index=0) for name in names}
    sender, receiver = RowSender(), RowReceiver()
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    assemblers = {name: RowAssembler(LAYERS, HIDDEN, torch.bfloat16) for name in names}
    for name, assembler in assemblers.items():
        receiver.add_request(name, assembler)
    spent: dict[str, list[float]] = {"worker": [], "engine": [], "arrive": []}
    for step in range(STEPS):
        plan = steady.plan(one * (10 + step), one)
        transfers = tuple(Transfer(each.index.projection, each.arena_rows, directions) for each in plan.streams)
        transfer = DeviceToHostCopier(arena.device).start(arena, None, plan, transfers)
        began = time.perf_counter()
        arrived = PendingRows(plan, transfer.rows, release=lambda: None).wait()
        owned = time.perf_counter()
        sender.collect(SimpleNamespace(**{ROWS_ATTRIBUTE: arrived}), requests)
        outputs = {0: EngineCoreOutputs()}
        sender.attach_to(outputs)
        message = encoder.encode(outputs[0])
        passed = time.perf_counter()
        # Copy, as a socket would.
        received = [bytes(frame) for frame in message]
        delivered = time.perf_counter()
        receiver.receive(decoder.decode(received).outputs)
        kept = time.perf_counter()
        for name, seconds in zip(spent, (owned - began, passed - owned, kept - delivered), strict=True):
            spent[name].append(seconds * 1e6 / REQUESTS)
    began = time.perf_counter()
    for name, assembler in assemblers.items():
        receiver.finish_request(name)
        assembler.assemble(spec, 10, 10 + STEPS + 1)
    assembled = (time.perf_counter() - began) * 1e6 / REQUESTS / STEPS
    # The mean: most of the front end's work happens in the few steps in which it splits rows.
    return {name: statistics.mean(values) for name, values in spent.items()} | {"assemble": assembled}


def measure_finish(layers: Any, reduce: Projection | None, *, at_once: bool) -> float:
    """Return the milliseconds of one step in which all requests finish."""
    spec, steady = make_batch(layers, reduce, FINISHED)
    names, one = steady.request_ids, np.ones(FINISHED, dtype=np.int64)
    manager = CaptureManager(Capabilities(LAYERS, HIDDEN, 4096, "bfloat16", {}, SteeringConfig()), "a model", {})
    specs = (("memory", spec),)
    spent = []
    for _ in range(ROUNDS):
        receiver, sender = RowReceiver(), RowSender()
        assemblers = {name: manager.new_assembler() for name in names}
        for name, assembler in assemblers.items():
            receiver.add_request(name, assembler)
        for step in range(STEPS):
            plan = steady.plan(one * (10 + step), one)
            rows = {
                each.index.projection: torch.zeros(plan.num_rows, 2 * HIDDEN if reduce is None else 4 * 16).byte()
                for each in plan.streams
            }
            sender.collect(
                SimpleNamespace(**{ROWS_ATTRIBUTE: PendingRows(plan, rows).wait()}),
                {name: SimpleNamespace(client_index=0) for name in names},
            )
            outputs: dict[int, Any] = {}
            sender.attach_to(outputs)
            receiver.receive(outputs[0].outputs)
        results = []
        began = time.perf_counter()
        with nullcontext() if at_once else manager.pause_consumers():
            for name, assembler in assemblers.items():
                receiver.finish_request(name)
                results.append(
                    manager.submit(
                        assembler, specs, request_id=name, sample=0, prompt_token_ids=(1,) * 10,
                        output_token_ids=(1,) * (STEPS + 1),
                    )
                )  # fmt: skip
        spent.append(1000 * (time.perf_counter() - began))
        for each in results:
            if each["memory"].status == "error":
                raise RuntimeError(each["memory"].error)
    manager.close()
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
            **identity(),
        },
        "microseconds_per_request_and_step": {name: measure(*case) for name, case in cases.items()},
        "ending_milliseconds": {
            name: {
                "held back": measure_finish(*cases[name], at_once=False),
                "at once": measure_finish(*cases[name], at_once=True),
            }
            for name in ("one layer", "16 probes at 4 layers")
        },
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: found for name, found in result.items() if name != "environment"}, indent=1))


if __name__ == "__main__":
    main()
