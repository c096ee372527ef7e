# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of steering and capture on a GPU, as ratios to stock vLLM in paired runs.

    python -m benchmarks.cost --groups "llama-8b, one pair" --out benchmarks/results/gpu-cost-{shape}.json

A stock engine and a steered engine run on the same GPU in separate processes and take turns: every repetition of every
variant is measured next to a repetition of stock. The script stores all raw times. Times per token are those of the
fastest repetitions, since other work on the host only adds time; other ratios are medians over the pairs. Times to the
first token are means of several runs. The models have random weights, decoding is greedy and ignores the end of
sequence, and the prefix cache is off. The engines of all shapes start together, and the shapes are measured one after
the other.

``benchmarks/groups.py`` has the groups of measurements. In "stock again", a second stock engine is measured in the
place of the steered one, which shows how far two identical engines differ. Several pairs of engines reduce this error.
A batch above 256 is a queue: only 256 of its short prompts run at a time, and only its throughput is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.groups import CONTROL, GROUPS, PREFILL, BenchmarkGroup
from benchmarks.shapes import SHAPES, environment, save_shape
from benchmarks.variants import SAE_NAME, SAE_VARIANT, register, save_sae, variants
from vllm_steer import SteeringConfig

AT_ONCE = 256
FIRST_TOKENS = 5
"""Number of runs of one token that are averaged, because single runs of an engine differ by up to a third."""


def serve(who: str, model: str, settings: dict[str, Any], pipe: Any) -> None:
    """Run an engine in a child process: execute the runs received through ``pipe`` and send back their seconds."""
    try:
        started = time.perf_counter()
        steered = who == "steered"
        if steered:
            from vllm_steer import LLM, SamplingParams

            settings = {**settings, "enable_steering": True}
        else:
            settings.pop("steering_config", None)
            from vllm import LLM, SamplingParams
        llm: Any = LLM(model=model, load_format="dummy", skip_tokenizer_init=True, seed=0, **settings)
        config = llm.llm_engine.vllm_config.model_config
        chosen = variants(config.get_total_num_hidden_layers(), config.get_hidden_size()) if steered else {}
        if steered:
            register(llm.steering, config.get_hidden_size())
        # Collections before runs then skip vLLM's modules, which would take up to half a second each time.
        gc.collect()
        gc.freeze()
        pipe.send({"started": time.perf_counter() - started})
        while (command := pipe.recv()) is not None:
            variant, batch, prompt, generated, times = command
            make = chosen[variant]["fields"] if steered else lambda i: {}
            prompts = [{"prompt_token_ids": [(7 * i + j) % 1000 + 2 for j in range(prompt)]} for i in range(batch)]
            params = [
                SamplingParams(max_tokens=generated, temperature=0, ignore_eos=True, detokenize=False, **make(i))
                for i in range(batch)
            ]
            gc.collect()
            began = time.perf_counter()
            for _ in range(times):
                outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = (time.perf_counter() - began) / times
            results = [o.capture_results["memory"] for o in outputs if getattr(o, "capture_results", None)]
            problems = sorted({str(result.error) for result in results if result.status != "ok"})
            pipe.send({"seconds": seconds, "captured": len(results), "problems": problems})
            del outputs, results
    except Exception:  # any failure ends this process; report it to the parent
        pipe.send({"failed": traceback.format_exc()})


class Engine:
    """Engine in a child process, controlled through a pipe."""

    def __init__(
        self, who: str, model: str, settings: dict[str, Any], target: Callable[..., None] = serve
    ) -> None:  # fmt: skip
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(who, model, settings, theirs))
        self._process.start()
        self._name = who

    def wait(self) -> None:
        """Wait until the engine has started."""
        print(self._name, "engine:", self._answer(), flush=True)

    def _answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._pipe.recv()
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer

    def run(self, variant: str, batch: int, prompt: int, generated: int, times: int = 1) -> float:
        """Return the seconds of a run, averaged over ``times`` runs."""
        self._pipe.send((variant, batch, prompt, generated, times))
        answer = self._answer()
        if answer["problems"]:
            print("problems:", answer["problems"][:2], flush=True)
        return float(answer["seconds"])

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(60)
        self._process.kill()


def compare(
    stock: list[Engine], steered: list[Engine], name: str, batch: int, prompt: int, generated: int, repeats: int
) -> Any:
    """Return the ratios of alternating runs with three output lengths, for each pair of engines.

    The time per output token is computed from the longest run and one of a quarter of its length, after every request
    has been admitted. The throughput is taken from the longest run and includes admission.
    """
    queued = batch > AT_ONCE
    lengths = [generated] if queued else [1, generated // 4, generated] if generated > 1 else [1]
    repeats = min(repeats, 3) if queued else repeats
    raw: dict[str, list[list[float]]] = {"stock": [], "steered": []}
    for one, other in zip(stock, steered, strict=True):
        for repeat in range(repeats + 1):
            order = [("stock", one), ("steered", other)]
            for who, engine in order if repeat % 2 else order[::-1]:
                if not queued:
                    # Warm up: an engine is slower after it has waited for the other one.
                    engine.run(name, batch, prompt, 1)
                seconds = [
                    engine.run(name, batch, prompt, length, FIRST_TOKENS if length == 1 else 1) for length in lengths
                ]
                # The first round is a warm-up.
                if repeat:
                    raw[who].append(seconds)
    pairs = list(zip(raw["steered"], raw["stock"], strict=True))
    found: dict[str, Any] = {"raw": raw, "engines": len(stock), "prompt": prompt, "lengths": lengths}
    if queued:
        ratios = sorted(b[0] / a[0] for a, b in pairs)
        found["throughput"], found["spread"] = statistics.median(ratios), [ratios[0], ratios[-1]]
        return found
    found["first token"] = first_token(raw, len(stock))
    if generated > 1:
        ratios = [(a[2] - a[1]) / (b[2] - b[1]) for a, b in pairs]
        found["per token"], found["median per token"] = per_token(raw, lengths, len(stock)), statistics.median(ratios)
        found["spread"] = [min(ratios), max(ratios)]
        found["by pair"] = [statistics.median(ratios[i : i + repeats]) for i in range(0, len(ratios), repeats)]
        found["throughput"] = statistics.median(b[2] / a[2] for a, b in pairs)
        found["stock ms per token"] = 1000 * statistics.median(
            (b[2] - b[1]) / (lengths[2] - lengths[1]) for _, b in pairs
        )
        found["stock ms to first token"] = 1000 * statistics.median(b[0] for _, b in pairs)
    return found


def per_token(raw: dict[str, list[list[float]]], lengths: list[int], pairs: int = 1) -> float:
    """Return the ratio of times per output token, from the fastest repetitions of each engine.

    Args:
        raw: Seconds of each run, by engine and length.
        lengths: Three output lengths; the last two are used.
        pairs: Number of pairs of engines in ``raw``; the result is the median over them.
    """

    def fastest(runs: list[list[float]]) -> float:
        return (min(run[2] for run in runs) - min(run[1] for run in runs)) / (lengths[2] - lengths[1])

    repeats = len(raw["stock"]) // pairs
    parts = [slice(i, i + repeats) for i in range(0, pairs * repeats, repeats)]
    return statistics.median(fastest(raw["steered"][part]) / fastest(raw["stock"][part]) for part in parts)


def first_token(raw: dict[str, list[list[float]]], pairs: int = 1) -> float:
    """Return the median ratio of times to the first token.

    An engine is slower after it has waited for the other one, by up to a third without a warm-up. The order alternates
    between repetitions, so each repetition is averaged with the next one, which has the opposite order.

    Args:
        raw: Seconds of each run, by engine.
        pairs: Number of pairs of engines in ``raw``.
    """
    ratios = [a[0] / b[0] for a, b in zip(raw["steered"], raw["stock"], strict=True)]
    repeats = len(ratios) // pairs
    by_pair = [ratios[i : i + repeats] for i in range(0, len(ratios), repeats)]
    together = [math.sqrt(one * other) for each in by_pair for one, other in pairwise(each)]
    return statistics.median(together or ratios)


def measure(group: BenchmarkGroup, engines: dict[str, list[Engine]], result: dict[str, Any], out: Path) -> None:
    """Measure the cells of a group. The file is written after each cell, so an aborted run keeps its results."""
    for wanted in group.cells:
        name, _, batches = wanted.partition("@")
        pairs = engines["stock"], engines["control" if name == CONTROL else "steered"], name
        for batch in batches.split(","):
            if batch == PREFILL:
                found = compare(*pairs, 1, 8192, 1, group.repeats)
                record(result, out, name, "prefill 8192", found)
            else:
                found = compare(*pairs, int(batch), 16, group.generated, group.repeats)
                record(result, out, name, batch, found)


def record(result: dict[str, Any], out: Path, name: str, batch: str, found: dict[str, Any]) -> None:
    """Add a measurement to the result, its file and the log."""
    result["variants"].setdefault(name, {})[batch] = found
    out.write_text(json.dumps(result, indent=1) + "\n")
    shown = {key: [round(each, 3) for each in value] if isinstance(value, list) else round(value, 4)
             for key, value in found.items() if key not in ("raw", "prompt", "lengths")}  # fmt: skip
    print(f"{result['shape']:12} {name:42} {batch:12} {shown}", flush=True)


def engine_settings(group: BenchmarkGroup) -> BenchmarkGroup:
    """Return the engine settings of a group. Groups with equal settings share their engines."""
    return group._replace(cells=(), repeats=0, generated=0)


def start(groups: list[BenchmarkGroup], steering: dict[str, Any], folder: Path) -> dict[str, list[Engine]]:
    """Start the engines that these groups share, without waiting for them."""
    group = groups[0]
    model = str(save_shape(group.shape, folder / group.shape))
    if any(cell.startswith(SAE_VARIANT) for each in groups for cell in each.cells):
        hidden = SHAPES[group.shape]["hidden_size"]
        steering = {**steering, "saes": {SAE_NAME: str(save_sae(folder / f"{group.shape}-sae", hidden))}}
    settings: dict[str, Any] = {
        "max_model_len": 8448, "max_num_seqs": AT_ONCE, "max_num_batched_tokens": 8192, "enable_prefix_caching": False,
        # With a fixed cache size, all engines can start at once: vLLM does not measure the free memory.
        "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": int(group.kv_gib * 2**30),
        "tensor_parallel_size": group.tensor_parallel, "steering_config": steering,
    }  # fmt: skip
    control = any(cell.startswith(CONTROL) for each in groups for cell in each.cells)
    kinds = {"stock": group.pairs, "steered": group.pairs, "control": group.pairs if control else 0}
    return {who: [Engine(who, model, dict(settings)) for _ in range(count)] for who, count in kinds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="output file; {shape} is replaced")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), required=True)
    parser.add_argument("--graph-sets", type=int, default=SteeringConfig().graph_sets)
    parser.add_argument("--plain-code", action=argparse.BooleanOptionalAction, help="the setting plain_code")
    arguments = parser.parse_args()
    groups = [GROUPS[name] for name in arguments.groups]
    started: dict[BenchmarkGroup, dict[str, list[Engine]]] = {}
    results: dict[Path, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for kind in dict.fromkeys(map(engine_settings, groups)):
                sharing = [group for group in groups if engine_settings(group) == kind]
                steering = {"graph_sets": arguments.graph_sets, "plain_code": arguments.plain_code}
                started[kind] = start(sharing, steering, Path(folder))
            # A starting engine would disturb the measurements.
            for engine in all_engines(started):
                engine.wait()
            for name, group in zip(arguments.groups, groups, strict=True):
                out = Path(str(arguments.out).format(shape=group.shape))
                result = results.setdefault(out, {
                    "shape": group.shape, "graph_sets": arguments.graph_sets, "plain_code": arguments.plain_code,
                    "tensor_parallel": group.tensor_parallel,
                    "groups": [], "environment": environment(), "variants": {},
                })  # fmt: skip
                result["groups"].append(name)
                measure(group, started[engine_settings(group)], result, out)
        finally:
            for engine in all_engines(started):
                engine.close()


def all_engines(started: dict[BenchmarkGroup, dict[str, list[Engine]]]) -> list[Engine]:
    return [engine for by_kind in started.values() for each in by_kind.values() for engine in each]


if __name__ == "__main__":
    main()
