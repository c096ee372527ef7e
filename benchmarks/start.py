# SPDX-License-Identifier: Apache-2.0
"""Measure the start of an engine and its KV cache: stock vLLM, steering, and steering without plain code.

    python -m benchmarks.start --shape llama-8b --out benchmarks/results/gpu-start.json

The engines start one after the other, each in a process of its own, with an empty compile cache and default settings.
The log of each engine is written next to the output file. It has the time and memory of each set of CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES, environment, save_shape

VARIANTS: dict[str, dict[str, Any]] = {
    "stock": {},
    "steering": {"enable_steering": True},
    "steering, no plain code": {"enable_steering": True, "steering_config": {"plain_code": False}},
}
CHILD = """
import json, sys, time
model, settings, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
if __name__ == "__main__":
    if settings.get("enable_steering"):
        from vllm_steer import LLM
    else:
        from vllm import LLM
    started = time.perf_counter()
    llm = LLM(model=model, load_format="dummy", skip_tokenizer_init=True, seed=0, **settings)
    seconds = time.perf_counter() - started
    cache = llm.llm_engine.vllm_config.cache_config
    with open(out, "w") as file:
        json.dump({"seconds": seconds, "cache blocks": cache.num_gpu_blocks, "block size": cache.block_size}, file)
"""


def start(variant: str, model: str, folder: Path, log: Path) -> dict[str, Any]:
    """Start an engine in a child process and return what it measured."""
    out, script = folder / f"{variant}.json", folder / "child.py"
    script.write_text(CHILD)
    caches = {name: str(folder / variant / name) for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR",
                                                              "TRITON_CACHE_DIR")}  # fmt: skip
    settings = {"max_model_len": 8448, **VARIANTS[variant]}
    command = [sys.executable, str(script), model, json.dumps(settings), str(out)]
    with log.open("wb") as file:
        subprocess.run(command, env={**os.environ, **caches}, stdout=file, stderr=subprocess.STDOUT, check=False)
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"failed": log.name}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    arguments = parser.parse_args()
    result: dict[str, Any] = {"shape": arguments.shape, "variants": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = str(save_shape(arguments.shape, folder / arguments.shape))
        for variant in arguments.variants:
            log = arguments.out.with_name(f"{arguments.out.stem}-{variant.replace(', ', '-').replace(' ', '-')}.log")
            result["variants"][variant] = start(variant, model, folder, log)
            print(variant, result["variants"][variant], flush=True)
    result["environment"] = environment()
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
