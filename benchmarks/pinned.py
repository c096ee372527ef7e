# SPDX-License-Identifier: Apache-2.0
"""How fast captured rows leave the GPU: a step's rows from the arena into pinned memory, and into memory of their own.

    python -m benchmarks.pinned --out benchmarks/results/gpu-pinned.json

What the worker does after a step whose rows leave as they are (``engine/device_to_host.py``), for steps of several
sizes, one
after the other and with the next one started before the last one has arrived, as under asynchronous scheduling.
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


def plan_of(rows: int) -> CapturePlan:
    """One request that stores one row per token."""
    entries = RowIndex(("request",), ((0,),))
    one = np.zeros(1, dtype=np.int64)
    return CapturePlan((RowStream(entries, one, None),), one, np.array([rows]), rows)


def measure(rows: int) -> dict[str, float]:
    """GB/s over :data:`STEPS` steps: until the rows are in pinned memory, and until they own their memory."""
    device = torch.device("cuda")
    arena = torch.randn(rows, HIDDEN, device=device).bfloat16()
    departures, plan, form = DeviceToHostCopier(device), plan_of(rows), (Transfer(b"", None, None),)
    pinned: list[float] = []
    size = arena.nbytes / 1e9

    def leave() -> PendingRows:
        return departures.start(arena, None, plan, form)

    for _ in range(5):
        leave().wait()
    for _ in range(STEPS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        pending = leave()
        pending.event.synchronize()
        pinned.append(time.perf_counter() - started)
        pending.wait()
    torch.cuda.synchronize()
    started = time.perf_counter()
    before = leave()
    for _ in range(STEPS - 1):
        following = leave()
        before.wait()
        before = following
    before.wait()
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
