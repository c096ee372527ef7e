# SPDX-License-Identifier: Apache-2.0
"""Measure the start of a server and its KV cache: stock vLLM, steering, and steering without plain code.

    python -m benchmarks.start --shape llama-8b --out benchmarks/results/gpu-start-llama-8b.json

The servers start one after the other on an otherwise idle GPU, with default settings: each with empty compile caches,
and again with the caches of its first start (``restart_seconds``). The time ends with the first successful health
check. The log of each start is written next to the output file. It has the time and memory of each set of CUDA graphs.
The file is written after each start.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.serve import save_model
from benchmarks.server_process import ServerProcess
from benchmarks.shapes import SHAPES, environment

VARIANTS: dict[str, tuple[str, ...]] = {
    "stock": (),
    "steering": ("--enable-steering",),
    "steering, no plain code": ("--enable-steering", "--no-steering-plain-code"),
}
"""Options of each server."""


def start(variant: str, model: Path, caches: Path, log: Path, eager: bool) -> dict[str, Any]:
    """Start a server with these compile caches, and return the seconds and its key-value cache, or its log's end."""
    options = ["--load-format", "dummy", "--max-model-len", "8448", *VARIANTS[variant]]
    options += ["--enforce-eager"] if eager else []
    with ServerProcess(model, options, log, caches, plugin=variant != "stock") as server:
        try:
            return server.wait_until_ready()
        except RuntimeError as error:
            return {"failed": str(error)[-1000:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--eager", action="store_true", help="no compilation, to try the script on a CPU")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"shape": arguments.shape, "environment": environment(), "servers": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(arguments.shape, folder / "model")
        for variant in arguments.variants:
            title = variant.replace(", ", "-").replace(" ", "-")
            log = arguments.out.with_name(f"{arguments.out.stem}-{title}.log")
            given = (variant, folder / "model", folder / title)
            found = result["servers"][variant] = start(*given, log, arguments.eager)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
            if "failed" not in found:
                again = start(*given, log.with_stem(f"{log.stem}-again"), arguments.eager)
                found |= (
                    {"failed": again["failed"]} if "failed" in again else {"restart_seconds": again["start_seconds"]}
                )
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")
            print(variant, found, flush=True)
    if failed := [name for name, found in result["servers"].items() if "failed" in found]:
        raise SystemExit(f"benchmarks.start: no start of: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
