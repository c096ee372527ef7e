# SPDX-License-Identifier: Apache-2.0
"""Measure how long a body keeps the API server from answering others, beside stock vLLM with the same body.

    python -m benchmarks.standstill --rounds 3 --out benchmarks/results/standstill.json

Two servers of the demo model run on this machine: stock vLLM without plug-ins, and one with steering and the routes of
peers. Each body, of a size up to the limit of bodies, is sent to both, while another client asks for ``/version``
without a pause. The longest answer of a body's rounds, from its shortest round, is its gap; what other work on the
machine adds differs between rounds. The aim is at most :data:`AIM` seconds beyond stock's gap.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import vllm

from benchmarks.build import identity
from benchmarks.front_end import DEMO, HIDDEN
from benchmarks.server_process import ServerProcess
from vllm_steer.request import pack_vector

AIM = 0.1
MIB = 1 << 20
VECTOR = [0.01 * ((i * 37) % 11 - 5) for i in range(HIDDEN)]
EDIT = {"kind": "add", "point": "post_block", "layers": 1, "vector": VECTOR}
PACKED = {**EDIT, "vector": pack_vector(VECTOR)}
PROBE = {"probe": VECTOR, "point": "post_block", "layer": 1}
COMPLETIONS, PATCH, MODULES = "/v1/completions", "/v1/steering/patch", "/v1/steering/modules"
BASE = {"model": ServerProcess.model_name, "prompt": "Once", "max_tokens": 1, "temperature": 0}
SITE = {"layer": 1, "hook": "post_block", "dest_position": 0, "source_inline": 0, "alpha": 1.0}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {**BASE, **fields}


BODIES: Mapping[str, Callable[[], tuple[str, dict[str, Any]]]] = {
    "a text of 8 MiB": lambda: completion(prompt="ab " * (8 * MIB // 3)),
    "8 MiB of a field that nobody knows": lambda: completion(note="x" * (8 * MIB)),
    "40 lists of 65,536 tokens": lambda: completion(steering=[{**PACKED, "tokens": [1] * 65_536}] * 40),
    "300 lists of 65,536 tokens": lambda: completion(steering=[{**PACKED, "tokens": [1] * 65_536}] * 300),
    "40 readouts of 65,536 positions": lambda: completion(
        readouts={f"r{i}": {**PROBE, "positions": [1] * 65_536} for i in range(40)}
    ),
    "400,000 names": lambda: completion(vllm_xargs={f"z{i:08d}": 1 for i in range(400_000)}),
    "400,000 names in Unicode": lambda: completion(vllm_xargs={f"z\u4e00{i:08d}": 1 for i in range(400_000)}),
    "300,000 fields in Unicode": lambda: completion(**{f"z\u4e00{i:08d}": 1 for i in range(300_000)}),
    "1,000 edits with vectors of numbers": lambda: completion(steering=[EDIT] * 1000),
    "20,000 packed edits": lambda: completion(steering=[PACKED] * 20_000),
    "1,000 subspaces": lambda: completion(steering=[{**PACKED, "subspace": [VECTOR] * 4}] * 1000),
    "a matrix of 4,000 rows": lambda: completion(steering=[{**EDIT, "vector": [VECTOR] * 4000, "tokens": "prompt"}]),
    "4,000 sites of a peer's patch": lambda: completion(patch=[SITE] * 4000),
    "100,000 pairs of a study": lambda: (PATCH, {"pairs": [{"clean": "a", "corrupt": "b", "answer": "c"}] * 100_000}),
    "a study of 8 MiB": lambda: (PATCH, {"clean": "ab " * (8 * MIB // 3), "corrupt": [5, 6], "answer": [7]}),
    "a module of 4,000 edits": lambda: (MODULES, {"name": "many", "edits": [EDIT] * 4000}),
    "brackets": lambda: completion(steering=json.loads("[" * 900 + "]" * 900), note=[[]] * MIB),
}
"""Route and body of each request."""


class Watch(threading.Thread):
    """A client that asks for an answer without work, and notes the longest that one took."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._host, self._ended = urlsplit(url).netloc, threading.Event()
        self.longest = 0.0

    def run(self) -> None:
        connection = http.client.HTTPConnection(self._host, timeout=300)
        while not self._ended.is_set():
            started = time.monotonic()
            connection.request("GET", "/version")
            connection.getresponse().read()
            self.longest = max(self.longest, time.monotonic() - started)
            self._ended.wait(0.001)

    def end(self) -> float:
        self._ended.set()
        self.join()
        return self.longest


def measure(url: str, route: str, data: bytes) -> tuple[float, int]:
    """Send a body; return the longest wait of the other client, and the status."""
    watch = Watch(url)
    watch.start()
    time.sleep(0.05)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    connection.request("POST", route, data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read()
    connection.close()
    return watch.end(), response.status


def start_servers(stack: ExitStack, folder: Path) -> dict[str, ServerProcess]:
    common = ["--dtype", "float32", "--enforce-eager", "--disable-uvicorn-access-log"]
    steering = ["--enable-steering", "--steering-peers", "vllm-lens", "rhizonymph"]
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    servers = {}
    for name, flags in (("stock", []), ("steering", steering)):
        process = ServerProcess(
            DEMO, [*common, *flags], folder / f"{name}.log", folder / "caches", plugin=name != "stock", env=env
        )
        servers[name] = stack.enter_context(process)
    for server in servers.values():
        server.wait_until_ready()
    return servers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = start_servers(stack, Path(folder))
        for name, make in BODIES.items():
            route, body = make()
            data = json.dumps(body).encode()
            gaps: dict[str, list[float]] = {server: [] for server in servers}
            statuses = {}
            for _ in range(arguments.rounds):
                for each, server in servers.items():
                    gap, statuses[each] = measure(server.url, route, data)
                    gaps[each].append(gap)
            figure = {"body": name, "route": route, "mib": round(len(data) / MIB, 1), "status": statuses}
            figure |= {f"{each}_seconds": round(min(found), 3) for each, found in gaps.items()}
            figure["beyond"] = round(min(gaps["steering"]) - min(gaps["stock"]), 3)
            figures.append(figure)
            print(json.dumps(figure), flush=True)
        environment = {
            "cpus": os.cpu_count(), "load_average": os.getloadavg(), "machine": platform.machine(),
            "vllm": vllm.__version__, **identity(),
        }  # fmt: skip
    result = {"environment": environment, "aim": AIM, "rounds": arguments.rounds, "figures": figures}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
