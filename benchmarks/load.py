# SPDX-License-Identifier: Apache-2.0
"""How long plain requests take at a server that 200 clients share with steered and captured ones, beside stock vLLM.

    python -m benchmarks.load --out benchmarks/results/load.json

Two servers over the demo model live side by side on this machine and take turns: one without the plug-in, at which all
clients send plain requests, and one with steering, at which they do the same ("plain") or a third each sends plain,
steered and captured requests ("mixed"). Each client sends its requests one after another, each with a prompt of its
own; latency is from sending a request until its whole answer is read. Clients and servers share the machine's cores, so
only the ratio of two runs that were made one after the other means something.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import vllm

from vllm_steer.spec import pack_vector

DEMO = Path(__file__).parents[1] / "demo" / "model"
MODEL, HIDDEN, LAYERS = "demo", 256, 6
CLIENTS, EACH, PAIRS, TOKENS = 200, 3, 5, 16
KINDS = ("plain", "steered", "captured")
# Name of a run -> server, and the kinds of request that its clients send.
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "stock": ("stock", ("plain",)),
    "plain": ("steering", ("plain",)),
    "mixed": ("steering", KINDS),
}
PERCENTILES = (50, 95, 99)
START_SECONDS = 300


def body_of(kind: str, client: int, number: int) -> dict[str, Any]:
    """A client's request; steered ones have a vector of their own, captured ones read two layers at all tokens."""
    words = np.random.default_rng((client, number)).integers(2, 4000, 48).tolist()
    body: dict[str, Any] = {
        "model": MODEL, "prompt": words, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True
    }  # fmt: skip
    if kind == "steered":
        vector = np.random.default_rng(client).standard_normal(HIDDEN).astype("f4")
        body["steering_vectors"] = {"post_block": {str(LAYERS // 2): pack_vector(vector)}}
    if kind == "captured":
        body["capture"] = {"memory": {"hooks": {"post_block": [2, 4]}, "positions": "all"}}
    return body


@contextlib.contextmanager
def server(steering: bool, folder: Path) -> Iterator[str]:
    """A running `vllm serve`; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(DEMO), "--served-model-name", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-num-seqs", "256", "--uvicorn-log-level", "warning"]
    env = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    }  # fmt: skip
    if steering:
        command.append("--enable-steering")
    else:
        env["VLLM_PLUGINS"] = "none"  # no plug-in of that name: this one is not loaded
    with (folder / f"{steering}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
    try:
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            time.sleep(0.5)
        else:
            raise RuntimeError(f"no server: {(folder / f'{steering}.log').read_text()[-4000:]}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


async def load(url: str, kinds: tuple[str, ...]) -> tuple[dict[str, list[float]], float]:
    """Milliseconds of each request by kind, and seconds of the whole run."""
    spent: dict[str, list[float]] = {kind: [] for kind in kinds}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def work(number: int) -> None:
            kind = kinds[number % len(kinds)]
            for i in range(EACH):
                body = body_of(kind, number, i)
                started = time.perf_counter()
                response = await client.post("/v1/completions", json=body)
                spent[kind].append(1000 * (time.perf_counter() - started))
                response.raise_for_status()

        started = time.perf_counter()
        await asyncio.gather(*(work(number) for number in range(CLIENTS)))
    return spent, time.perf_counter() - started


def figures(spent: dict[str, list[float]], seconds: float) -> dict[str, Any]:
    """Of one run: milliseconds by kind and percentile, and requests per second."""
    by_kind = {
        kind: {f"p{p}": round(float(np.percentile(times, p)), 1) for p in PERCENTILES} for kind, times in spent.items()
    }
    return {"requests_per_second": round(sum(map(len, spent.values())) / seconds, 1), "milliseconds": by_kind}


def ratios(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of plain requests to those of stock in the same pair: median, least and greatest over the pairs."""
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
    parser.add_argument("--beside", default="nothing", help="what else ran on the machine")
    arguments = parser.parse_args()
    pairs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        urls = {kind: stack.enter_context(server(kind == "steering", Path(name))) for kind in ("stock", "steering")}
        for where, kinds in RUNS.values():  # what is made at the first request is made
            asyncio.run(load(urls[where], kinds))
        for number in range(PAIRS):
            order = list(RUNS) if number % 2 else list(reversed(RUNS))
            pair: dict[str, Any] = {}
            for run in order:
                where, kinds = RUNS[run]
                pair[run] = figures(*asyncio.run(load(urls[where], kinds)))
            pairs.append({"load_average": round(os.getloadavg()[0], 2), **{run: pair[run] for run in RUNS}})
            print(json.dumps(pairs[-1]), flush=True)
    environment = {
        "cpus": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__, "vllm": vllm.__version__,
        "beside": arguments.beside,
    }  # fmt: skip
    setup = {"clients": CLIENTS, "requests_each": EACH, "prompt_tokens": 48, "generated_tokens": TOKENS}
    result = {"environment": environment, "setup": setup, "ratios": ratios(pairs), "pairs": pairs}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
