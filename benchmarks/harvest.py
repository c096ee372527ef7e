# SPDX-License-Identifier: Apache-2.0
"""Measure rows per second of ``harvest`` beside prompt tokens per second of stock vLLM without this package.

    python -m benchmarks.harvest --out benchmarks/results/harvest.json

Both engines have the same model and settings, in processes of their own, and take turns in several rounds, in another
order each round. All ways of a round run texts of the same lengths, which no other has. A row of ``harvest`` is one
token at all layers of the way. Files go to the folder of temporary files. Only ratios within a round are meaningful.
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

from benchmarks.build import identity

TEXTS, TOKENS = 16, 128
STOCK = "stock vLLM, prefill"
WAYS: dict[str, Any] = {STOCK: None, "harvest, one layer": [15], "harvest, all layers": "all"}


def serve(pipe: Any, model: str, ways: list[str]) -> None:
    """Run an engine: receive a way and texts, and send the seconds that they took."""
    os.environ["VLLM_PLUGINS"] = "none" if ways == [STOCK] else "steering"
    import vllm

    import vllm_steer

    settings: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "seed": 0}
    llm: Any = (
        vllm.LLM(model, **settings) if ways == [STOCK] else vllm_steer.LLM(model, enable_steering=True, **settings)
    )
    params = vllm.SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    pipe.send(vllm.__version__)
    while (given := pipe.recv()) is not None:
        way, texts = given
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            if way == STOCK:
                llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
            else:
                from vllm_steer.lab import harvest

                found = harvest(llm, texts, folder, layers=WAYS[way], positions="all_prompt")
                assert found.rows == TEXTS * TOKENS, found
            pipe.send(time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".models/SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--beside", default="nothing", help="other load on the machine, for the record")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR")
    context, random, pipes, rounds = multiprocessing.get_context("spawn"), np.random.default_rng(0), {}, []
    for ways in ([STOCK], [way for way in WAYS if way != STOCK]):
        pipe, other = context.Pipe()
        context.Process(target=serve, args=(other, arguments.model, ways)).start()
        other.close()  # so that the end of the process ends the pipe
        version = pipe.recv()
        pipes.update(dict.fromkeys(ways, pipe))
    for _ in range(arguments.rounds + 1):  # the first one warms up
        speeds = {}
        for way in random.permutation(list(WAYS)).tolist():
            pipes[way].send((way, random.integers(1000, 40_000, (TEXTS, TOKENS)).tolist()))
            speeds[way] = round(TEXTS * TOKENS / pipes[way].recv(), 1)
        rounds.append({**speeds, "load_average": round(os.getloadavg()[0], 2)})
        print(json.dumps(rounds[-1]), flush=True)
    for pipe in set(pipes.values()):
        pipe.send(None)
    about = {"cpus": os.cpu_count(), "machine": platform.machine(), "vllm": version, "beside": arguments.beside}
    ratios = {way: [each[way] / each[STOCK] for each in rounds[1:]] for way in WAYS}
    result = {
        "environment": {**about, **identity()},
        "setup": {"model": Path(arguments.model).name, "texts": TEXTS, "tokens": TOKENS, "dtype": "float32"},
        "rows_per_second": {way: round(statistics.median(each[way] for each in rounds[1:]), 1) for way in WAYS},
        "ratio": {way: [round(f(r), 3) for f in (statistics.median, min, max)] for way, r in ratios.items()},
        "rounds": rounds[1:],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["ratio"]))


if __name__ == "__main__":
    main()
