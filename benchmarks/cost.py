# SPDX-License-Identifier: Apache-2.0
"""What steering and capture cost on a GPU, as ratios to stock vLLM in paired runs.

    python -m benchmarks.cost --shapes llama-8b --out benchmarks/results/gpu-cost-{shape}.json

A stock engine and a steered one live side by side on the same GPU, each in processes of its own, and take turns: every
repeat of every variant is measured next to a repeat of stock. Of each pair the ratio counts; the median over the pairs
is reported, and all raw times are kept; first tokens are the mean of several runs. Random weights, greedy, no end of
sequence, prefix cache off. The engines of several shapes start together and are measured one shape after the other.

With ``--control`` a second stock engine is measured as if it were a steered one: "stock again" is how far two engines
that do the same are apart. ``--pairs`` of engines, measured one after the other, make less of that. A batch of more
than 256 is a queue: so many short prompts at once, of which 256 run at a time; of it only the throughput is measured.
``--lots`` names what is to be measured, in which order, and with how much memory, in ``benchmarks/lots.py``.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.lots import CONTROL, LOTS, PREFILL, Lot
from benchmarks.shapes import SHAPES, environment, save_shape
from benchmarks.variants import register, variants
from vllm_steer import SteeringConfig

AT_ONCE = 256
FIRST_TOKENS = 5
"""Runs of one token each that are one figure together: single ones of an engine are up to a third apart."""
PREFILLED = ("idle", "one site")


def serve(who: str, model: str, settings: dict[str, Any], pipe: Any) -> None:
    """A child process: an engine that runs what it is told and answers with seconds."""
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
        pipe.send({"started": time.perf_counter() - started})
        while (told := pipe.recv()) is not None:
            variant, batch, prompt, generated, times = told
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
    except Exception:  # whatever it is, it ends this process, and the one that waits at the pipe has to hear of it
        pipe.send({"failed": traceback.format_exc()})


class Engine:
    """A child process and the pipe to it."""

    def __init__(self, who: str, model: str, settings: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(who, model, settings, theirs))
        self._process.start()
        self._name = who

    def wait(self) -> None:
        """Until it has started."""
        print(self._name, "engine:", self._answer(), flush=True)

    def _answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._pipe.recv()
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer

    def run(self, variant: str, batch: int, prompt: int, generated: int, times: int = 1) -> float:
        """Seconds of a run, of so many the mean."""
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
    """Alternating runs of three lengths, of each pair of engines; the ratios run by run.

    Time per output token is the difference between the longest run and one of a quarter of its length: by then every
    request has been admitted. Throughput is that of the longest run, admission included.
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
                    # One that has waited while the other ran is slower at first.
                    engine.run(name, batch, prompt, 1)
                seconds = [
                    engine.run(name, batch, prompt, length, FIRST_TOKENS if length == 1 else 1) for length in lengths
                ]
                # The first round warms up and is not kept.
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
        found["per token"] = statistics.median(ratios)
        found["spread"] = [min(ratios), max(ratios)]
        found["by pair"] = [statistics.median(ratios[i : i + repeats]) for i in range(0, len(ratios), repeats)]
        found["throughput"] = statistics.median(b[2] / a[2] for a, b in pairs)
        found["stock ms per token"] = 1000 * statistics.median(
            (b[2] - b[1]) / (lengths[2] - lengths[1]) for _, b in pairs
        )
        found["stock ms to first token"] = 1000 * statistics.median(b[0] for _, b in pairs)
    return found


def first_token(raw: dict[str, list[list[float]]], pairs: int = 1) -> float:
    """The ratio of times to the first token, from the seconds of each run of so many pairs of engines.

    An engine that has waited while the other ran is slower at first, by up to a third where no run was made ahead, and
    that is the one or the other by turns: so each repeat counts together with the next one, in which they ran in the
    other order.
    """
    ratios = [a[0] / b[0] for a, b in zip(raw["steered"], raw["stock"], strict=True)]
    repeats = len(ratios) // pairs
    by_pair = [ratios[i : i + repeats] for i in range(0, len(ratios), repeats)]
    together = [math.sqrt(one * other) for each in by_pair for one, other in pairwise(each)]
    return statistics.median(together or ratios)


def measure(lot: Lot, engines: dict[str, list[Engine]], result: dict[str, Any], out: Path) -> None:
    """The cells of a lot, into the result and its file: what has been measured is there if time runs out."""
    for wanted in lot.cells:
        name, _, batches = wanted.partition("@")
        pairs = engines["stock"], engines["control" if name == CONTROL else "steered"], name
        for batch in batches.split(","):
            if batch == PREFILL:
                found = compare(*pairs, 1, 8192, 1, lot.repeats)
                _note(result, out, name, "prefill 8192", found)
            else:
                found = compare(*pairs, int(batch), 16, lot.generated, lot.repeats)
                _note(result, out, name, batch, found)


def _note(result: dict[str, Any], out: Path, name: str, batch: str, found: dict[str, Any]) -> None:
    """Into the result, its file and the log."""
    result["variants"].setdefault(name, {})[batch] = found
    out.write_text(json.dumps(result, indent=1) + "\n")
    shown = {key: [round(each, 3) for each in value] if isinstance(value, list) else round(value, 4)
             for key, value in found.items() if key not in ("raw", "prompt", "lengths")}  # fmt: skip
    print(f"{result['shape']:12} {name:42} {batch:12} {shown}", flush=True)


def lots_of(arguments: argparse.Namespace) -> list[Lot]:
    """Those that are asked for by name, or one of each shape with what else is asked for."""
    if arguments.lots:
        return [LOTS[name] for name in arguments.lots]
    named = arguments.only or [*variants(2, 8), *([CONTROL] if arguments.control else [])]
    cells = tuple(
        each if "@" in each else f"{each}@{','.join(usual_batches(each, arguments.batches))}" for each in named
    )
    return [
        Lot(
            shape, arguments.kv_gib, cells, pairs=arguments.pairs, repeats=arguments.repeats,
            generated=arguments.generated, tensor_parallel=arguments.tensor_parallel,
        )
        for shape in arguments.shapes
    ]  # fmt: skip


def usual_batches(variant: str, batches: list[str]) -> list[str]:
    """Of those that are asked for the ones that the variant is measured at; prefill besides, where it is."""
    if variant == "capture all layers, all tokens":
        return [batch for batch in batches if int(batch) <= 128]
    return [*batches, *([PREFILL] if variant in PREFILLED else [])]


def engines_of(lot: Lot) -> Lot:
    """What its engines depend on: lots that are equal in it are measured with the same ones."""
    return lot._replace(cells=(), repeats=0, generated=0)


def start(lots: list[Lot], steering: dict[str, Any], folder: Path) -> dict[str, list[Engine]]:
    """The engines of lots that have the same ones, which are starting when this returns."""
    lot = lots[0]
    model = str(save_shape(lot.shape, folder / lot.shape))
    settings: dict[str, Any] = {
        "max_model_len": 8448, "max_num_seqs": AT_ONCE, "max_num_batched_tokens": 8192, "enable_prefix_caching": False,
        # A fixed cache lets all start at once: vLLM's measuring of free memory would see the other engines.
        "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": int(lot.kv_gib * 2**30),
        "tensor_parallel_size": lot.tensor_parallel, "steering_config": steering,
    }  # fmt: skip
    control = any(cell.startswith(CONTROL) for each in lots for cell in each.cells)
    kinds = {"stock": lot.pairs, "steered": lot.pairs, "control": lot.pairs if control else 0}
    return {who: [Engine(who, model, dict(settings)) for _ in range(count)] for who, count in kinds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="with {shape} in its name")
    parser.add_argument("--lots", nargs="+", choices=list(LOTS), help="of benchmarks/lots.py; else what follows counts")
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["llama-8b"])
    parser.add_argument("--batches", nargs="+", default=["1", "8", "32", "128", "256"])
    parser.add_argument("--only", nargs="+", help="some of the variants, as NAME or NAME@BATCH,BATCH,prefill")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--generated", type=int, default=256)
    parser.add_argument("--graph-sets", type=int, default=SteeringConfig().graph_sets)
    parser.add_argument("--plain-code", action="store_true", help="the setting plain_code")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--kv-gib", type=float, default=12, help="key-value cache of each engine, on each GPU")
    parser.add_argument("--pairs", type=int, default=1, help="pairs of engines of each shape")
    parser.add_argument("--control", action="store_true", help="a second stock engine beside the first")
    parser.add_argument("--after", type=Path, help="do not measure before this file is there")
    arguments = parser.parse_args()
    lots = lots_of(arguments)
    started: dict[Lot, dict[str, list[Engine]]] = {}
    results: dict[Path, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for kind in dict.fromkeys(map(engines_of, lots)):
                alike = [lot for lot in lots if engines_of(lot) == kind]
                steering = {"graph_sets": arguments.graph_sets, "plain_code": arguments.plain_code}
                started[kind] = start(alike, steering, Path(folder))
            # Nothing is measured beside an engine that is still starting.
            for engine in every_one(started):
                engine.wait()
            while arguments.after is not None and not arguments.after.exists():
                time.sleep(0.1)
            for i, lot in enumerate(lots):
                out = Path(str(arguments.out).format(shape=lot.shape))
                result = results.setdefault(out, {
                    "shape": lot.shape, "graph_sets": arguments.graph_sets, "plain_code": arguments.plain_code,
                    "tensor_parallel": lot.tensor_parallel,
                    "lots": [], "environment": environment(), "variants": {},
                })  # fmt: skip
                result["lots"] += arguments.lots[i : i + 1] if arguments.lots else []
                measure(lot, started[engines_of(lot)], result, out)
        finally:
            for engine in every_one(started):
                engine.close()


def every_one(started: dict[Lot, dict[str, list[Engine]]]) -> list[Engine]:
    return [engine for by_kind in started.values() for each in by_kind.values() for engine in each]


if __name__ == "__main__":
    main()
