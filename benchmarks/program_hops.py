# SPDX-License-Identifier: Apache-2.0
"""Measure the CPU time to send a request's program to the engine's process, as bytes and as a file name.

    python -m benchmarks.program_hops --out benchmarks/results/program-hops.json

vLLM's encoder and decoder run in one process, connected by the same kind of ZMQ sockets. Results are median
microseconds of CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import zmq
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

SIZES = {
    "none": 0,
    "a name": 150,
    "3 sites, 48 KiB": 48 << 10,
    "16 probes, 256 KiB": 256 << 10,
    "96 sites, 1.5 MiB": 3 << 19,
}
ROUNDS, WARM_UP = 200, 50


def measure(size: int, sender: Any, receiver: Any) -> dict[str, float]:
    """Return the microseconds by stage for a request with ``size`` bytes in ``extra_args``."""
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
    params = SamplingParams(max_tokens=16, extra_args={"steer": os.urandom(size)})
    request = EngineCoreRequest(
        request_id="request", prompt_token_ids=[1] * 16, mm_features=None, sampling_params=params,
        pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip
    spent: dict[str, list[float]] = {stage: [] for stage in ("encode", "send", "receive", "decode")}
    for _ in range(ROUNDS):
        times = [time.process_time()]
        frames = encoder.encode(request)
        times.append(time.process_time())
        sender.send_multipart(frames, copy=False)
        times.append(time.process_time())
        received = receiver.recv_multipart(copy=False)
        times.append(time.process_time())
        decoder.decode(received)
        times.append(time.process_time())
        for stage, start, end in zip(spent, times, times[1:], strict=False):
            spent[stage].append(1e6 * (end - start))
    found = {stage: round(statistics.median(each[WARM_UP:]), 1) for stage, each in spent.items()}
    return {**found, "together": round(sum(found.values()), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    context = zmq.Context()
    with tempfile.TemporaryDirectory() as folder:
        sender, receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        receiver.bind(f"ipc://{folder}/socket")
        sender.connect(f"ipc://{folder}/socket")
        found = {name: measure(size, sender, receiver) for name, size in SIZES.items()}
        context.destroy(linger=0)
    environment = {"cpus": os.cpu_count(), "load_average": os.getloadavg()}
    result = {"environment": environment, "microseconds": found}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
