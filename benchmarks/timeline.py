# SPDX-License-Identifier: Apache-2.0
"""Measure how long the GPU is busy and idle in a step, for stock vLLM and for vLLM with steering.

    python -m benchmarks.timeline --shape llama-8b --batch 256 --out benchmarks/results/gpu-timeline.json

Two engines with default settings (own processes, runner V2, CUDA graphs, asynchronous scheduling) run one batch after
another while the profiler records the GPU. If the GPU is idle for longer than with stock vLLM, the host limits the
step. If it is busy for longer, the result names the kernels that cause it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks import trace
from benchmarks.shapes import SHAPES, environment, save_shape
from benchmarks.variants import register, variants

STOCK, TOKENS = "stock", 64
STEPS = 18, 56
"""First and last step of the summary. In between, all requests of the batch run and none ends."""


def serve(engine: str, model: str, pipe: Any) -> None:
    """Run an engine in a child process and measure each variant and batch size that arrives on ``pipe``."""
    try:
        # Allows `collective_rpc` to send `trace.begin` to the worker.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        settings: dict[str, Any] = {
            "max_model_len": 2048, "max_num_seqs": 256, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.1,
            "kv_cache_memory_bytes": 4 << 30, "enable_prefix_caching": False,
        }  # fmt: skip
        if engine == STOCK:
            from vllm import LLM, SamplingParams
        else:
            from vllm_steer import LLM, SamplingParams

            settings["enable_steering"] = True
        llm: Any = LLM(model=model, load_format="dummy", skip_tokenizer_init=True, seed=0, **settings)
        config = llm.llm_engine.vllm_config.model_config
        available: dict[str, dict[str, Any]] = {STOCK: {"fields": lambda i: {}}}
        if engine != STOCK:
            available = variants(config.get_total_num_hidden_layers(), config.get_hidden_size())
            register(llm.steering, config.get_hidden_size())
        pipe.send(None)
        while (task := pipe.recv()) is not None:
            variant, batch = task
            prompts = [{"prompt_token_ids": [(7 * i + j) % 1000 + 2 for j in range(16)]} for i in range(batch)]
            params = [
                SamplingParams(
                    max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False,
                    **available[variant]["fields"](i),
                )
                for i in range(batch)
            ]  # fmt: skip
            # The first round warms up.
            llm.generate(prompts, params, use_tqdm=False)
            llm.collective_rpc(trace.begin)
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            pipe.send({"seconds": seconds, **llm.collective_rpc(trace.end, args=STEPS)[0]})
    except Exception:  # the parent process waits at the pipe, so report any error
        pipe.send({"failed": traceback.format_exc()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument(
        "--variants",
        nargs="+",
        # Idle again: earlier variants must not slow it down.
        default=[
            "idle",
            "one site",
            "capture one layer, all tokens",
            "16 probes by name at 4 layers, all tokens",
            "idle",
        ],
    )
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    result: dict[str, Any] = {"shape": arguments.shape, "batch": arguments.batch, "variants": {}}
    with tempfile.TemporaryDirectory() as folder:
        model = str(save_shape(arguments.shape, Path(folder, arguments.shape)))
        engines = {}
        for engine in (STOCK, "steered"):
            pipe, child_pipe = context.Pipe()
            process = context.Process(target=serve, args=(engine, model, child_pipe))
            process.start()
            engines[engine] = (process, pipe)
        try:
            for _, pipe in engines.values():
                if (answer := pipe.recv()) is not None:
                    raise RuntimeError(answer["failed"])
            result["environment"] = environment()
            stock: dict[str, dict[str, float]] = {}
            for variant in (STOCK, *arguments.variants):
                _, pipe = engines[STOCK if variant == STOCK else "steered"]
                pipe.send((variant, arguments.batch))
                answer = pipe.recv()
                if "failed" in answer:
                    raise RuntimeError(answer["failed"])
                times = {kind: answer.pop(kind) for kind in ("kernels", "waits")}
                stock = stock or times
                for kind, spent in times.items():
                    # Report differences of at least a microsecond per step.
                    more = {name: spent.get(name, 0) - stock[kind].get(name, 0) for name in {**stock[kind], **spent}}
                    answer[f"more {kind}"] = {name: x for name, x in sorted(more.items()) if abs(x) >= 1e-3}
                again = " again" if variant in result["variants"] else ""
                result["variants"][variant + again] = answer
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")
                shown = {
                    name: value
                    for name, value in answer.items()
                    if name not in ("periods", "more kernels", "more waits")
                }
                print(variant + again, {name: round(value, 3) for name, value in shown.items()}, flush=True)
        finally:
            for process, pipe in engines.values():
                # A failed engine has closed its end of the pipe.
                with contextlib.suppress(BrokenPipeError):
                    pipe.send(None)
                process.join(20)
                process.kill()


if __name__ == "__main__":
    main()
