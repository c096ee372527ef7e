# SPDX-License-Identifier: Apache-2.0
"""Write throughput of the filesystem consumer by file layout, into the page cache of a local disk.

    python benchmarks/capture_consumers.py

There are two kinds of requests with hidden size 4,096 in bfloat16: ``large`` captures 2,048 tokens at 4 sites (64 MiB),
and ``small`` the last prompt token at 32 sites (256 KiB). Each run writes its requests with `FilesystemConsumer.accept`
into a new directory, closes the consumer, verifies one tensor and removes the directory. For comparison, each run first
writes the same number of bytes to a plain file in blocks of a request's size. This shows the speed of the machine at
that moment, and touches the memory, which dominates first writes on virtual machines. Pending writes are flushed before
both measurements. All times go to benchmarks/results/capture-consumers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch

from vllm_steer import __version__
from vllm_steer.capture import CapturedRequest, SiteRows
from vllm_steer.capture.consumers.filesystem import FilesystemConsumer
from vllm_steer.capture.files.reader import open_captures
from vllm_steer.capture.files.rotation import ROTATION_LIMITS
from vllm_steer.request import CaptureSpec

HIDDEN = 4096
RESULTS = Path(__file__).parent / "results" / "capture-consumers.json"


@dataclass(frozen=True)
class Kind:
    """Size of a request, and number of requests per run."""

    name: str
    tokens: int
    layers: int
    requests: int


KINDS = (Kind("large", 2048, 4, 32), Kind("small", 1, 32, 2048))
LAYOUTS = ("per_request", *ROTATION_LIMITS)


def make_request(kind: Kind) -> CapturedRequest:
    """Return a request as the front end passes it on: one contiguous, unshared tensor per site."""
    layers = range(kind.layers)
    positions = np.arange(2048 - kind.tokens, 2048)
    rows = [torch.randn(kind.tokens, HIDDEN).to(torch.bfloat16) for _ in layers]
    return CapturedRequest(
        request_id="benchmark",
        sample=0,
        model="model",
        prompt_token_ids=tuple(range(2048)),
        output_token_ids=(1, 2),
        spec=CaptureSpec(hooks={"post_block": layers}),
        sites={("post_block", layer): SiteRows(positions, rows[layer]) for layer in layers},
        status="ok",
        error=None,
    )


def run(kind: Kind, layout: Any, where: Path) -> dict[str, float]:
    """Write one run and return the seconds of all ``accept`` calls and of ``close``."""
    request = make_request(kind)
    folder = Path(tempfile.mkdtemp(prefix="captures-", dir=where))
    try:
        plain = write_plain(kind, folder / "plain")
        os.sync()
        consumer = FilesystemConsumer(root=str(folder), layout=layout)
        start = time.perf_counter()
        for _ in range(kind.requests):
            consumer.accept(request)
        accepted = time.perf_counter()
        consumer.close()
        closed = time.perf_counter()
        stored = list(open_captures(folder))
        site = ("post_block", kind.layers - 1)
        if len(stored) != kind.requests or not torch.equal(stored[-1].tensor(*site), request.tensor(*site)):
            raise RuntimeError(f"{layout}: the data read back differ from the data written")
        files = len(list(folder.iterdir()))
    finally:
        shutil.rmtree(folder)
    return {"plain_s": plain, "accept_s": accepted - start, "close_s": closed - accepted, "files": files}


def write_plain(kind: Kind, path: Path) -> float:
    """Return the seconds to write the bytes of a run to a plain file, and remove it."""
    block = memoryview(np.random.default_rng(0).bytes(kind.layers * kind.tokens * HIDDEN * 2))
    os.sync()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        start = time.perf_counter()
        for i in range(kind.requests):
            os.posix_fallocate(fd, i * block.nbytes, block.nbytes)
            if os.pwrite(fd, block, i * block.nbytes) != block.nbytes:
                raise RuntimeError("the disk is full")
        return time.perf_counter() - start
    finally:
        os.close(fd)
        path.unlink()


def environment(where: Path) -> dict[str, Any]:
    """Return the properties of the machine that affect the figures."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    mount = max((m for m in mounts if where.resolve().is_relative_to(m[1])), key=lambda m: len(m[1]))
    return {
        "cpus": os.cpu_count(),
        "cpu": sorted(models),
        "load_average": os.getloadavg(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "file_system": mount[2],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "vllm_steer": __version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", type=Path, default=Path(tempfile.gettempdir()), help="directory to write to")
    parser.add_argument("--runs", type=int, default=5, help="runs of each kind and layout")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file for the results")
    args = parser.parse_args()
    cases: list[dict[str, Any]] = []
    results = {"environment": environment(args.where), "cases": cases}
    for kind in KINDS:
        size = kind.requests * kind.layers * kind.tokens * HIDDEN * 2
        run(kind, LAYOUTS[0], args.where)  # warm-up
        for layout in LAYOUTS:
            runs = [run(kind, layout, args.where) for _ in range(args.runs)]
            seconds = statistics.median(r["accept_s"] + r["close_s"] for r in runs)
            case: dict[str, Any] = {
                "kind": kind.name,
                "layout": layout,
                "requests": kind.requests,
                "row_bytes": size,
                "runs": runs,
                "median_plain_bytes_per_s": size / statistics.median(r["plain_s"] for r in runs),
                "median_bytes_per_s": size / seconds,
                "median_us_per_request": seconds / kind.requests * 1e6,
            }
            cases.append(case)
            print(
                f"{kind.name:6} {layout:12} {size / seconds / 1e9:6.2f} GB/s, "
                f"plain file {case['median_plain_bytes_per_s'] / 1e9:6.2f} GB/s, "
                f"{case['median_us_per_request']:9.1f} us a request"
            )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
