# SPDX-License-Identifier: Apache-2.0
"""Measure the latency of plain requests while 200 clients share a server with steered and captured requests.

    python -m benchmarks.load --out benchmarks/results/load.json

Two servers of the demo model run on this machine and take turns. To the stock server, without the plug-in, all clients
send plain requests. To the steering server they do the same ("plain"), or a third of the clients each sends plain,
steered and captured requests ("mixed"). Each client sends its requests one after another with different prompts. The
latency of a request ends when its whole response has been read. Clients and servers share the machine's cores, so only
ratios of consecutive runs are meaningful.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import vllm

from benchmarks.build import identity
from benchmarks.server_process import ServerProcess
from vllm_steer.request import pack_vector

DEMO = Path(__file__).parents[1] / "demo" / "model"
MODEL, HIDDEN, LAYERS = ServerProcess.model_name, 256, 6
CLIENTS, EACH, PAIRS, TOKENS = 200, 3, 5, 16
KINDS = ("plain", "steered", "captured")
# Name of a run -> its server and the kinds of requests that its clients send.
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "stock": ("stock", ("plain",)),
    "plain": ("steering", ("plain",)),
    "mixed": ("steering", KINDS),
}
PERCENTILES = (50, 95, 99)


def make_body(kind: str, client: int, number: int) -> dict[str, Any]:
    """Return a request body. A steered request has its client's vector; a captured one captures two layers."""
    prompt = np.random.default_rng((client, number)).integers(2, 4000, 48).tolist()
    body: dict[str, Any] = {
        "model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True
    }  # fmt: skip
    if kind == "steered":
        vector = np.random.default_rng(client).standard_normal(HIDDEN).astype("f4")
        body["steering_vectors"] = {"post_block": {str(LAYERS // 2): pack_vector(vector)}}
    if kind == "captured":
        body["capture"] = {"memory": {"hooks": {"post_block": [2, 4]}, "positions": "all"}}
    return body


@contextlib.contextmanager
def server(steering: bool, folder: Path) -> Iterator[str]:
    """Run ``vllm serve`` and yield its URL."""
    options = ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "256", "--uvicorn-log-level", "warning"]
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}
    if steering:
        options.append("--enable-steering")
    log = folder / f"{steering}.log"
    with ServerProcess(DEMO, options, log, folder / "caches", plugin=steering, env=env) as process:
        process.wait_until_ready()
        yield process.url


async def run_clients(url: str, kinds: tuple[str, ...]) -> tuple[dict[str, list[float]], float]:
    """Return the latency of each request in milliseconds, by kind, and the duration of the run in seconds."""
    spent: dict[str, list[float]] = {kind: [] for kind in kinds}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def work(number: int) -> None:
            kind = kinds[number % len(kinds)]
            for i in range(EACH):
                body = make_body(kind, number, i)
                started = time.perf_counter()
                response = await client.post("/v1/completions", json=body)
                spent[kind].append(1000 * (time.perf_counter() - started))
                response.raise_for_status()

        started = time.perf_counter()
        await asyncio.gather(*(work(number) for number in range(CLIENTS)))
    return spent, time.perf_counter() - started


def summarize(spent: dict[str, list[float]], seconds: float) -> dict[str, Any]:
    """Return the latency percentiles of one run in milliseconds, by kind, and its requests per second."""
    by_kind = {
        kind: {f"p{p}": round(float(np.percentile(times, p)), 1) for p in PERCENTILES} for kind, times in spent.items()
    }
    return {"requests_per_second": round(sum(map(len, spent.values())) / seconds, 1), "milliseconds": by_kind}


def latency_ratios(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the latency of plain requests relative to stock vLLM in the same pair: median, minimum and maximum."""
    found: dict[str, Any] = {}
    for run in RUNS:
        for p in (f"p{p}" for p in PERCENTILES):
            each = [pair[run]["milliseconds"]["plain"][p] / pair["stock"]["milliseconds"]["plain"][p] for pair in pairs]
            found.setdefault(run, {})[p] = [round(x, 3) for x in (statistics.median(each), min(each), max(each))]
    del found["stock"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--beside", default="nothing", help="other work that ran on the machine")
    arguments = parser.parse_args()
    pairs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        urls = {kind: stack.enter_context(server(kind == "steering", Path(name))) for kind in ("stock", "steering")}
        for server_name, kinds in RUNS.values():  # warm up
            asyncio.run(run_clients(urls[server_name], kinds))
        for number in range(PAIRS):
            order = list(RUNS) if number % 2 else list(reversed(RUNS))
            pair: dict[str, Any] = {}
            for run in order:
                server_name, kinds = RUNS[run]
                pair[run] = summarize(*asyncio.run(run_clients(urls[server_name], kinds)))
            pairs.append({"load_average": round(os.getloadavg()[0], 2), **{run: pair[run] for run in RUNS}})
            print(json.dumps(pairs[-1]), flush=True)
    environment = {
        "cpus": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__, "vllm": vllm.__version__,
        "beside": arguments.beside, **identity()
    }  # fmt: skip
    setup = {"clients": CLIENTS, "requests_each": EACH, "prompt_tokens": 48, "generated_tokens": TOKENS}
    result = {"environment": environment, "setup": setup, "ratios": latency_ratios(pairs), "pairs": pairs}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
