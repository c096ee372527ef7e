# SPDX-License-Identifier: Apache-2.0
"""Measure how fast captured rows move from the GPU into pinned memory, and on into pageable memory.

    python -m benchmarks.pinned --out benchmarks/results/gpu-pinned.json

Measures the worker's copy of unreduced rows after a step (``engine/device_to_host.py``) for several step sizes: one
copy after the other, and with the next copy started before the previous one has ended, as in asynchronous scheduling.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.shapes import environment
from vllm_steer.capture.step_plan import CapturePlan, RowStream
from vllm_steer.capture.step_rows import RowIndex
from vllm_steer.engine.device_to_host import DeviceToHostCopier, PendingRows, Transfer

HIDDEN = 4096
ROWS = (256, 2048, 8192)
STEPS = 40


def make_plan(rows: int) -> CapturePlan:
    """Return the plan of one request that stores one row per token."""
    index = RowIndex(("request",), ((0,),))
    one = np.zeros(1, dtype=np.int64)
    return CapturePlan((RowStream(index, one, None),), one, np.array([rows]), rows)


def measure(rows: int) -> dict[str, float]:
    """Return the GB/s over :data:`STEPS` steps, until rows are in pinned memory and until in pageable memory."""
    device = torch.device("cuda")
    arena = torch.randn(rows, HIDDEN, device=device).bfloat16()
    copier, plan, transfers = DeviceToHostCopier(device), make_plan(rows), (Transfer(b"", None, None),)
    pinned: list[float] = []
    size = arena.nbytes / 1e9

    def start_copy() -> PendingRows:
        return copier.start(arena, None, plan, transfers)

    for _ in range(5):
        start_copy().wait()
    for _ in range(STEPS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        pending = start_copy()
        pending.event.synchronize()
        pinned.append(time.perf_counter() - started)
        pending.wait()
    torch.cuda.synchronize()
    started = time.perf_counter()
    pending = start_copy()
    for _ in range(STEPS - 1):
        following = start_copy()
        pending.wait()
        pending = following
    pending.wait()
    owned = (time.perf_counter() - started) / STEPS
    return {"mib": arena.nbytes / 2**20, "pinned": size / statistics.median(pinned), "owned": size / owned}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    found: dict[str, Any] = {str(rows): measure(rows) for rows in ROWS}
    result = {"environment": environment(), "hidden": HIDDEN, "steps": STEPS, "gb_per_second": found}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
