# SPDX-License-Identifier: Apache-2.0
"""Python time of captured rows on their way, per captured request and step, on a CPU.

    python benchmarks/assembly.py --out benchmarks/results/assembly.json

Three places do work per request and step: the worker splits a step's rows by request, the scheduler's process passes
them on, and the front end keeps them. Measured without a model: 64 requests that decode one token each and read one
layer or all 32 of a model 4,096 wide.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_steer.capture.assemble import Assembly
from vllm_steer.engine.collect import ATTRIBUTE, PendingRows, Planned
from vllm_steer.engine.outbox import OUTPUT_KEY, Outbox
from vllm_steer.program import compile_program, resolve
from vllm_steer.spec import CaptureSpec

LAYERS, HIDDEN, REQUESTS, STEPS = 32, 4096, 64, 50


def measure(layers: Any) -> dict[str, float]:
    """Microseconds per captured request and step of each place."""
    spec = CaptureSpec(hooks={"post_block": layers}, positions="all")
    resolved = resolve(compile_program([], [spec]), 10, LAYERS)
    names = [f"request-{i}" for i in range(REQUESTS)]
    planned = tuple(Planned(name, resolved, i, 1) for i, name in enumerate(names))
    rows = torch.zeros(REQUESTS * resolved.max_captures, HIDDEN, dtype=torch.bfloat16)
    outbox, live = Outbox(), set(names)
    assemblies = {name: Assembly(LAYERS, HIDDEN, torch.bfloat16) for name in names}
    spent: dict[str, list[float]] = {"split": [], "pass on": [], "keep": []}
    for step in range(STEPS):
        position = torch.full((REQUESTS,), 10 + step, dtype=torch.int64)
        started = time.perf_counter()
        chunks = PendingRows(planned, rows, position, None).arrived()
        split = time.perf_counter()
        outbox.take_in(SimpleNamespace(**{ATTRIBUTE: chunks}), live)
        outputs = [SimpleNamespace(request_id=name, kv_transfer_params=None) for name in names]
        outbox.hand_out({0: SimpleNamespace(outputs=outputs)}, live)
        passed = time.perf_counter()
        for output in outputs:
            assemblies[output.request_id].add(output.kv_transfer_params[OUTPUT_KEY])
        kept = time.perf_counter()
        for name, seconds in zip(spent, np.diff([started, split, passed, kept]), strict=True):
            spent[name].append(float(seconds) * 1e6 / REQUESTS)
    return {name: statistics.median(values) for name, values in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    result = {
        "environment": {"cpus": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__},
        "microseconds_per_request_and_step": {"one layer": measure([16]), "32 layers": measure("all")},
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["microseconds_per_request_and_step"], indent=1))


if __name__ == "__main__":
    main()
