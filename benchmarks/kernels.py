# SPDX-License-Identifier: Apache-2.0
"""Compare the kernels and copies of a decode step between stock vLLM and vLLM with steering.

    python -m benchmarks.kernels --shape llama-8b --out benchmarks/results/gpu-kernels.json

Each engine runs in its own process, with CUDA graphs and default settings. While a fixed batch decodes, the profiler
(CUPTI, which records the kernels inside graphs) lists the work of each stream. An idle step with steering must have the
same list as a step of stock vLLM.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES, environment, save_shape

STEPS = 4
WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def work_of(profiler: Any) -> list[dict[str, Any]]:
    """Return the kernels and copies that a stopped profiler recorded, sorted by stream and time (microseconds)."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return sorted((e for e in events if e.get("cat") in WORK), key=lambda e: (e["args"]["stream"], e["ts"]))


def record(variant: str, model: str, batch: int, plain_code: bool | None, pipe: Any) -> None:
    """Send the names of the kernels and copies in ``STEPS`` decode steps, per stream in order, from a child process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.variants import variants

    settings: dict[str, Any] = {
        "max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 4 << 30, "enable_prefix_caching": False,
    }  # fmt: skip
    if variant == "stock":
        from vllm import LLM, SamplingParams
    else:
        from vllm_steer import LLM, SamplingParams

        settings |= {"enable_steering": True, "steering_config": {"plain_code": plain_code}}
    llm: Any = LLM(model=model, load_format="dummy", skip_tokenizer_init=True, seed=0, **settings)
    engine = llm.llm_engine
    config = engine.vllm_config.model_config
    fields = (
        (lambda i: {})
        if variant == "stock"
        else variants(config.get_total_num_hidden_layers(), config.get_hidden_size())[variant]["fields"]
    )
    # The first round compiles and captures.
    for number in range(2):
        for i in range(batch):
            params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, detokenize=False, **fields(i))
            engine.add_request(f"{number}-{i}", {"prompt_token_ids": [7 * i + j + 2 for j in range(16)]}, params)
        if number:
            for _ in range(8):
                engine.step()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                for _ in range(STEPS):
                    engine.step()
            streams: dict[int, list[str]] = {}
            for event in work_of(profiler):
                streams.setdefault(event["args"]["stream"], []).append(event["name"])
            pipe.send(list(streams.values()))
        while engine.has_unfinished_requests():
            engine.step()
    pipe.close()


def record_in_process(variant: str, model: str, batch: int, plain_code: bool | None = None) -> list[list[str]]:
    """Run :func:`record` in a child process and return its result."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=record, args=(variant, model, batch, plain_code, sender))
    process.start()
    sender.close()
    try:
        streams: list[list[str]] = receiver.recv()
    finally:
        process.join(60)
        process.kill()
    return streams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--plain-code", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--variants", nargs="+", default=["idle", "one site"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(save_shape(arguments.shape, Path(folder, arguments.shape)))
        stock = record_in_process("stock", model, arguments.batch)
        result: dict[str, Any] = {
            "shape": arguments.shape, "batch": arguments.batch, "steps": STEPS, "plain_code": arguments.plain_code,
            "stock": _count_names(stock), "variants": {},
        }  # fmt: skip
        for variant in arguments.variants:
            streams = record_in_process(variant, model, arguments.batch, arguments.plain_code)
            difference = Counter(name for stream in streams for name in stream)
            difference.subtract(Counter(name for stream in stock for name in stream))
            comparison: dict[str, Any] = {
                "equal": streams == stock,
                "difference": {name: count for name, count in sorted(difference.items()) if count},
            }
            result["variants"][variant] = comparison
            print(variant, comparison, flush=True)
            arguments.out.write_text(json.dumps(result, indent=1))
    result["environment"] = environment()
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def _count_names(streams: list[list[str]]) -> list[list[str | int]]:
    """Return for each stream the names of its work, each followed by its count."""
    return [[item for name, count in Counter(stream).items() for item in (name, count)] for stream in streams]


if __name__ == "__main__":
    main()
