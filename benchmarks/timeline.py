# SPDX-License-Identifier: Apache-2.0
"""What limits a step: how long the GPU is busy in it and how long it has nothing to do, for stock vLLM and for ours.

    python -m benchmarks.timeline --shape llama-8b --batch 256 --out benchmarks/results/gpu-timeline.json

Two engines as users run them (processes of their own, runner V2, CUDA graphs, asynchronous scheduling) serve one batch
after another while the profiler lists what runs on the GPU. If the GPU is idle for longer than under stock vLLM, the
host is what limits; if it is busy for longer, the kernels that are named are.
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
"""All requests have joined by then, and none has ended."""


def serve(who: str, model: str, pipe: Any) -> None:
    """A child process: an engine that runs what it is told."""
    try:
        # The profiler is switched on by a function of ours in the worker.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        settings: dict[str, Any] = {
            "max_model_len": 2048, "max_num_seqs": 256, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.1,
            "kv_cache_memory_bytes": 4 << 30, "enable_prefix_caching": False,
        }  # fmt: skip
        if who == STOCK:
            from vllm import LLM, SamplingParams
        else:
            from vllm_steer import LLM, SamplingParams

            settings["enable_steering"] = True
        llm: Any = LLM(model=model, load_format="dummy", skip_tokenizer_init=True, seed=0, **settings)
        config = llm.llm_engine.vllm_config.model_config
        chosen: dict[str, dict[str, Any]] = {STOCK: {"fields": lambda i: {}}}
        if who != STOCK:
            chosen = variants(config.get_total_num_hidden_layers(), config.get_hidden_size())
            register(llm.steering, config.get_hidden_size())
        pipe.send(None)
        while (told := pipe.recv()) is not None:
            variant, batch = told
            prompts = [{"prompt_token_ids": [(7 * i + j) % 1000 + 2 for j in range(16)]} for i in range(batch)]
            params = [
                SamplingParams(
                    max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False,
                    **chosen[variant]["fields"](i),
                )
                for i in range(batch)
            ]  # fmt: skip
            # The first round is for what is made once.
            llm.generate(prompts, params, use_tqdm=False)
            llm.collective_rpc(trace.begin)
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            pipe.send({"seconds": seconds, **llm.collective_rpc(trace.end, args=STEPS)[0]})
    except Exception:  # whatever it is, it ends this process, and the one that waits at the pipe has to hear of it
        pipe.send({"failed": traceback.format_exc()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument(
        "--variants",
        nargs="+",
        # Idle again: whatever was done before must leave no trace.
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
        for who in (STOCK, "steered"):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(who, model, theirs))
            process.start()
            engines[who] = (process, ours)
        try:
            for _, pipe in engines.values():
                if (answer := pipe.recv()) is not None:
                    raise RuntimeError(answer["failed"])
            result["environment"] = environment()
            usual: dict[str, dict[str, float]] = {}
            for variant in (STOCK, *arguments.variants):
                _, pipe = engines[STOCK if variant == STOCK else "steered"]
                pipe.send((variant, arguments.batch))
                answer = pipe.recv()
                if "failed" in answer:
                    raise RuntimeError(answer["failed"])
                found = {what: answer.pop(what) for what in ("kernels", "waits")}
                usual = usual or found
                for what, spent in found.items():
                    # What differs by a microsecond a step and more.
                    changed = {name: spent.get(name, 0) - usual[what].get(name, 0) for name in {**usual[what], **spent}}
                    answer[f"more {what}"] = {name: more for name, more in sorted(changed.items()) if abs(more) >= 1e-3}
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
                # One that has failed no longer listens.
                with contextlib.suppress(BrokenPipeError):
                    pipe.send(None)
                process.join(20)
                process.kill()


if __name__ == "__main__":
    main()
