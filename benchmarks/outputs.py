# SPDX-License-Identifier: Apache-2.0
"""Measure the front end's time for one output, with vLLM's own output processor and with ours around it.

    python -m benchmarks.outputs --out benchmarks/results/outputs.json

No engine runs: outputs of one token each for 256 requests pass through ``OutputProcessor.process_outputs``. Results are
microseconds per output, the minimum of several steps. Wraps apply to a whole process, so each case runs in its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.build import identity
from benchmarks.front_end import make_context

REQUESTS, STEPS = 256, 400
CASES = ("stock vLLM", "plain requests", "steered requests", "captured requests")
KINDS = {"streamed": "DELTA", "at the end": "FINAL_ONLY"}


def measure(case: str, kind: str, pipe: Any) -> None:
    """Measure in a child process and send the microseconds per output."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor

    fields: dict[str, Any] = {}
    if case == CASES[0]:
        from vllm import SamplingParams
    else:
        from vllm_steer import SamplingParams
        from vllm_steer.plugin.entry_point import wrap_front_end

        wrap_front_end()
        fields = {
            CASES[2]: {"steering_vectors": {"post_block": {3: np.ones(4096, "f4")}}},
            CASES[3]: {"capture": {"memory": {"hooks": {"post_block": [3]}, "positions": "all"}}},
        }.get(case, {})
    processor = OutputProcessor(None, log_stats=False)
    if case == CASES[3]:
        processor._steering_context = make_context()
    for i in range(REQUESTS):
        request = EngineCoreRequest(
            request_id=f"request-{i}", external_req_id=f"request-{i}", prompt_token_ids=[1] * 16, mm_features=None,
            sampling_params=SamplingParams(
                max_tokens=2 * STEPS, detokenize=False, output_kind=RequestOutputKind[kind], **fields
            ),
            pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        processor.add_request(request, None)
    outputs = [EngineCoreOutput(request_id=f"request-{i}", new_token_ids=[5]) for i in range(REQUESTS)]
    least = float("inf")
    for _ in range(STEPS):
        started = time.perf_counter()
        processor.process_outputs(outputs)
        least = min(least, time.perf_counter() - started)
    pipe.send(1e6 * least / REQUESTS)


def measure_in_process(case: str, kind: str) -> float:
    """Run :func:`measure` in a child process and return its result."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(case, kind, sender))
    process.start()
    sender.close()
    try:
        return float(receiver.recv())
    finally:
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    found = {name: {case: measure_in_process(case, kind) for case in CASES} for name, kind in KINDS.items()}
    environment = {"cpus": os.cpu_count(), "load_average": os.getloadavg(), "machine": platform.machine(), **identity()}
    arguments.out.write_text(json.dumps({"environment": environment, "microseconds": found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
