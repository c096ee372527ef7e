# SPDX-License-Identifier: Apache-2.0
"""Measure the CPU time of the API server's process, with this package beside stock vLLM.

    python -m benchmarks.front_end --rounds 5 --out benchmarks/results/api-server.json

Three servers of the demo model run on this machine, and one of them works at a time: stock vLLM without plug-ins, one
with the package installed and steering off, and one with steering. In each round and each cell, which is a route and a
number of streams, the client drives each way (`WAYS`) once, in rotating order. Requests are streamed, and the lengths
of their outputs are spread by half. Each way of a round and cell has the same prompts and lengths.

A ratio compares the CPU seconds of the API server's process in two ways of one round and cell; the result has the
median of the rounds. CPU seconds depend less on other load than times, but a busy machine empties the caches, so run it
on an idle one. Further options go to all servers; on a GPU, give ``--gpu-memory-utilization 0.2``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import vllm

from benchmarks.build import identity
from benchmarks.server_process import ServerProcess, cpu_seconds
from vllm_steer.request import pack_vector

DEMO = Path(__file__).parents[1] / "demo" / "model"
HIDDEN, LAYERS, PROBES = 256, 6, 16
LENGTH, SPREAD = 48, 0.5
MODULE = "probes"
ROUTES = ("/v1/completions", "/v1/chat/completions")
STREAMS: Mapping[int, int] = {64: 192, 256: 512}
"""Requests of a cell by the number of streams at one time."""
WAYS: Mapping[str, str] = {
    "stock": "stock",
    "off": "off",
    "idle": "steering",
    "own vector": "steering",
    "16 probes": "steering",
    "one layer to files": "steering",
}
"""The server of each way."""
TARGETS: Mapping[str, tuple[float | None, float | None]] = {
    "off": (1.005, None),
    "idle": (1.01, None),
    "own vector": (None, 0.2),
    "16 probes": (1.0, None),
    "one layer to files": (None, 0.5),
}
"""The largest ratio to stock vLLM's CPU seconds, and the largest addition to a request in milliseconds."""


def fields(way: str, number: int) -> dict[str, Any]:
    """Return the fields of a request; the vector is so small that it changes no token."""
    if way == "own vector":
        vector = 1e-9 * np.random.default_rng(number).standard_normal(HIDDEN).astype("f4")
        return {"steering_vectors": {"post_block": {str(LAYERS // 2): pack_vector(vector)}}}
    if way == "16 probes":
        sites = [{"point": "post_block", "layer": i % 4 + 1} for i in range(PROBES)]
        return {"readouts": {f"p{i}": {"probe": f"{MODULE}/p{i}", **site} for i, site in enumerate(sites)}}
    if way == "one layer to files":
        return {"capture": {"filesystem": {"hooks": {"post_block": [LAYERS // 2]}, "positions": "all"}}}
    return {}


def body(route: str, way: str, number: int) -> dict[str, Any]:
    """Return the body of one request."""
    random = np.random.default_rng((number, 1))
    length = int(random.integers(int(LENGTH * (1 - SPREAD)), int(LENGTH * (1 + SPREAD)) + 1))
    settings = {"model": ServerProcess.model_name, "max_tokens": length, "temperature": 0, "ignore_eos": True}
    if route == ROUTES[0]:
        prompt: dict[str, Any] = {"prompt": random.integers(2, 4000, 16).tolist()}
    else:
        prompt = {"messages": [{"role": "user", "content": f"Tell story {number} about a cat."}]}
    return {**settings, **prompt, **fields(way, number), "stream": True}


async def stream(url: str, route: str, sent: Mapping[str, Any]) -> int:
    """Send one request and return the number of events of its stream."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    data = json.dumps(sent).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + data)
    received = await reader.read(-1)
    writer.close()
    events = received.count(b"data: {")
    if not received.startswith(b"HTTP/1.1 200 ") or b"data: [DONE]" not in received or b'data: {"error"' in received:
        raise RuntimeError(f"{route}: {received[:1000]!r}")
    return events


async def drive(url: str, route: str, way: str, streams: int, requests: int, first: int) -> int:
    """Send all requests of a cell, ``streams`` at one time, and return the number of events."""
    numbers = iter(range(first, first + requests))

    async def client() -> int:
        return sum([await stream(url, route, body(route, way, number)) for number in numbers])

    return sum(await asyncio.gather(*(client() for _ in range(streams))))


def run_cell(server: ServerProcess, route: str, way: str, streams: int, requests: int, first: int) -> dict[str, Any]:
    """Return the CPU seconds of the API server's process and the number of events."""
    before = cpu_seconds(server.process.pid)["api server"]
    events = asyncio.run(drive(server.url, route, way, streams, requests, first))
    spent = cpu_seconds(server.process.pid)["api server"] - before
    return {"seconds": round(spent, 3), "events": events}


def summarize(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each cell and way, the medians of the rounds: ratio to stock vLLM and what a request adds."""
    places = {(cell["route"], cell["streams"], cell["way"], cell["round"]): cell for cell in cells}
    figures = []
    for route, streams, way in dict.fromkeys(place[:3] for place in places if place[2] != "stock"):
        pairs = [
            (cell, places[route, streams, "stock", place[3]])
            for place, cell in places.items()
            if place[:3] == (route, streams, way) and (route, streams, "stock", place[3]) in places
        ]
        if not pairs:
            continue
        ratios = [ours["seconds"] / stock["seconds"] for ours, stock in pairs]
        added = [1000 * (ours["seconds"] - stock["seconds"]) / STREAMS[streams] for ours, stock in pairs]
        per_event = [1e6 * ours["seconds"] / ours["events"] for ours, _ in pairs]
        figures.append(
            {
                "route": route, "streams": streams, "way": way, "rounds": len(pairs),
                "ratio": round(statistics.median(ratios), 4),
                "ratios": [round(min(ratios), 4), round(max(ratios), 4)],
                "added_ms_per_request": round(statistics.median(added), 3),
                "us_per_event": round(statistics.median(per_event), 1),
                "target": TARGETS[way],
            }
        )  # fmt: skip
    return figures


def start_servers(stack: ExitStack, folder: Path, options: Sequence[str]) -> dict[str, ServerProcess]:
    """Start the three servers and return them by name."""
    common = ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "256", "--disable-uvicorn-access-log"]
    common += options
    steering = ["--enable-steering", "--capture-consumers", f"filesystem:root={folder / 'captures'}"]
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    servers = {}
    for name, flags in (("stock", []), ("off", []), ("steering", steering)):
        process = ServerProcess(
            DEMO, [*common, *flags], folder / f"{name}.log", folder / "caches", plugin=name != "stock", env=env
        )
        servers[name] = stack.enter_context(process)
        process.wait_until_ready()  # before the next: on a GPU, servers that start together mistake each other's memory
    rows = np.random.default_rng(2).standard_normal((PROBES, HIDDEN), dtype="f4").tolist()
    probes = {f"p{i}": row for i, row in enumerate(rows)}
    servers["steering"].post("/v1/steering/modules", {"name": MODULE, "probes": probes})
    return servers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    arguments, options = parser.parse_known_args()
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = start_servers(stack, Path(folder), options)
        for way, name in WAYS.items():  # imports, caches, and the first files
            for route in ROUTES:
                run_cell(servers[name], route, way, 8, 16, 10**6)
        for number in range(arguments.rounds):
            for streams, requests in STREAMS.items():
                for route in ROUTES:
                    ways = list(WAYS)
                    for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                        first = (number * len(STREAMS) + list(STREAMS).index(streams)) * 1000
                        found = run_cell(servers[WAYS[way]], route, way, streams, requests, first)
                        cells.append({"route": route, "streams": streams, "way": way, "round": number, **found})
                    print(json.dumps(cells[-len(ways) :]), flush=True)
            environment = {
                "cpus": os.cpu_count(), "load_average": os.getloadavg(), "machine": platform.machine(),
                "vllm": vllm.__version__, **identity(),
            }  # fmt: skip
            result = {"environment": environment, "figures": summarize(cells), "cells": cells}
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["figures"], indent=1))


if __name__ == "__main__":
    main()
