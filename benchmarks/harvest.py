# SPDX-License-Identifier: Apache-2.0
"""Measure rows per second of ``harvest`` beside prompt tokens per second of stock vLLM without this package.

    python -m benchmarks.harvest --out benchmarks/results/harvest.json
    python -m benchmarks.harvest --shape llama-8b --out benchmarks/results/gpu-harvest-llama-8b.json

Both engines have the same model and settings, in processes of their own, and take turns in several rounds, in another
order each round. All ways of a round run texts of the same lengths, which no other has. A row of ``harvest`` is one
token at all layers of the way. Files go to the folder of temporary files. Only ratios within a round are meaningful.
"plain writes" appends the bytes of all layers to a file there, from one buffer and one thread: the most that a
harvest to this disk can reach; its second figure includes fsync.
With a shape, the weights are random, in bfloat16 and with vLLM's compilation, for a GPU with room for both engines.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shapes import SHAPES, environment, save_shape

STOCK = "stock vLLM, prefill"
ONE, ALL = "harvest, one layer", "harvest, all layers"
WRITES = "plain writes"
WAYS = (STOCK, ONE, ALL)
LOCAL: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512}
RANDOM: dict[str, Any] = {
    "dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024,
    "gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 4 << 30, "max_num_batched_tokens": 8192,
}  # fmt: skip


def serve(pipe: Any, model: str, ways: list[str], settings: dict[str, Any]) -> None:
    """Run an engine: receive a way and texts, and send the seconds that they took."""
    os.environ["VLLM_PLUGINS"] = "none" if ways == [STOCK] else "steering"
    import vllm

    import vllm_steer

    steering = {} if ways == [STOCK] else {"enable_steering": True}
    llm: Any = (vllm_steer if steering else vllm).LLM(model, seed=0, **settings, **steering)
    middle = llm.model_config.get_total_num_hidden_layers() // 2
    params = vllm.SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    pipe.send(None)
    while (given := pipe.recv()) is not None:
        way, texts = given
        with tempfile.TemporaryDirectory() as acts:
            started = time.perf_counter()
            if way == STOCK:
                llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
            else:
                from vllm_steer.lab import harvest

                found = harvest(llm, texts, acts, layers="all" if way == ALL else [middle], positions="all_prompt")
                assert found.rows == sum(map(len, texts)), found
            pipe.send(time.perf_counter() - started)


def plain_writes(num_bytes: int, part: int) -> tuple[float, float]:
    """Append ``num_bytes`` in pieces of ``part`` to a file; return the gigabytes per second, without and with fsync."""
    buffer = np.random.default_rng(0).bytes(part)
    with tempfile.TemporaryFile() as file:
        started = time.perf_counter()
        for _ in range(num_bytes // part):
            os.write(file.fileno(), buffer)
        written = time.perf_counter()
        os.fsync(file.fileno())
        return tuple(num_bytes / 1e9 / (end - started) for end in (written, time.perf_counter()))  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".models/SmolLM2-135M-Instruct")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="random weights of this shape instead of a model")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--beside", default="nothing", help="other load on the machine, for the record")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR")
    shape, folder = arguments.shape, tempfile.TemporaryDirectory()
    model = str(save_shape(shape, Path(folder.name) / shape)) if shape else arguments.model
    settings, count, length = (RANDOM, 256, 512) if shape else (LOCAL, 16, 128)
    about_model = json.loads((Path(model) / "config.json").read_text())
    layers = about_model["num_hidden_layers"]
    row = about_model["hidden_size"] * layers * (2 if shape else 4)
    context, random, pipes, rounds = multiprocessing.get_context("spawn"), np.random.default_rng(0), {}, []
    for ways in ([STOCK], [way for way in WAYS if way != STOCK]):
        pipe, other = context.Pipe()
        context.Process(target=serve, args=(other, model, ways, settings)).start()
        other.close()  # so that the end of the process ends the pipe
        pipes.update(dict.fromkeys(ways, pipe))
    for pipe in set(pipes.values()):
        pipe.recv()  # has started
    print("started", flush=True)
    for _ in range(arguments.rounds + 1):  # the first one warms up
        speeds = {}
        for way in random.permutation(WAYS).tolist():
            pipes[way].send((way, random.integers(10, 2_000 if shape else 40_000, (count, length)).tolist()))
            speeds[way] = round(count * length / pipes[way].recv(), 1)
        writes = [round(each, 2) for each in plain_writes(min(count * length * row, 4 << 30), length * row // layers)]
        rounds.append({**speeds, WRITES: writes, "load_average": round(os.getloadavg()[0], 2)})
        print(json.dumps(rounds[-1]), flush=True)
    for pipe in set(pipes.values()):
        pipe.send(None)
    folder.cleanup()
    about = {"cpus": os.cpu_count(), "machine": platform.machine(), "beside": arguments.beside}
    used = {ONE: row // layers, ALL: row}
    rates = {way: statistics.median(each[way] for each in rounds[1:]) * size / 1e9 for way, size in used.items()}
    for number, name in enumerate((WRITES, f"{WRITES} with fsync")):
        rates[name] = statistics.median(each[WRITES][number] for each in rounds[1:])
    ratios = {way: [each[way] / each[STOCK] for each in rounds[1:]] for way in WAYS}
    result = {
        "environment": {**about, **environment()},
        "setup": {"model": Path(model).name, "texts": count, "tokens": length, "dtype": settings["dtype"]},
        "rows_per_second": {way: round(statistics.median(each[way] for each in rounds[1:]), 1) for way in WAYS},
        "gigabytes_per_second": {name: round(rate, 3) for name, rate in rates.items()},
        "ratio": {way: [round(f(r), 3) for f in (statistics.median, min, max)] for way, r in ratios.items()},
        "rounds": rounds[1:],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["ratio"]))


if __name__ == "__main__":
    main()
