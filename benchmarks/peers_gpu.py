# SPDX-License-Identifier: Apache-2.0
"""Measure this project and its peers on a GPU, each against stock vLLM in the same environment.

    python -m benchmarks.peers_gpu --shape llama-8b --out benchmarks/results/gpu-peers-llama-8b.json
    python -m benchmarks.peers_gpu --projects vllm-lens --out benchmarks/results/gpu-peers-llama-8b.json

Of each project, an engine and an engine of stock vLLM run on the same GPU in two processes and take turns, as in
``benchmarks/cost.py``. Workloads: the stream after the middle layer, captured at every token; one vector added to that
stream; and batches of 256 requests with 1, 4, 16, 64 and 256 different vectors. The first two run with 1, 8, 32 and 256
requests. A ratio compares tokens per second (median of the repetitions). The vectors are so small that they change no
token.

A peer that cannot be imported is recorded as absent. Peers need their own versions of vLLM, so the command runs again
in an environment of each; rows of other projects in the file are kept. The file is written after each row.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import multiprocessing
import statistics
import tempfile
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cost import Engine
from benchmarks.serve import save_model
from benchmarks.shapes import SHAPES, environment, package_version

OURS, LENS, INTERP = "vllm-steer", "vllm-lens", "interp-engine"
PLUGINS = {OURS: "steering", LENS: "activations"}
"""Plug-ins that vLLM loads in the engines of a project; none in other engines."""
MODULES = {OURS: "vllm_steer", LENS: "vllm_lens", INTERP: "interp_engine"}
WORKLOADS = ("one layer captured", "one layer steered")
VECTORS = "different vectors"
"""Workload whose requests have the given number of different vectors, in turn."""
SIZE = 1e-9
"""Size of the elements of the steering vector."""


class Served(NamedTuple):
    """An engine of a project.

    ``run`` takes the workload, prompts, tokens to generate and number of different vectors; ``captured`` returns the
    number of captured rows.
    """

    run: Callable[[str, list[list[int]], int, int], None]
    captured: Callable[[], int]


def vector(hidden: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return (SIZE * np.random.default_rng(seed).standard_normal(hidden)).astype("f4")


def in_turn(
    workload: str, prompts: list[list[int]], vectors: int, captured: Any, steered: Callable[[int], Any]
) -> list[Any]:
    """Return the fields of each request: ``captured``, or what ``steered`` makes for its vector."""
    if workload == WORKLOADS[0]:
        return [captured] * len(prompts)
    return [steered(i % vectors if workload == VECTORS else 0) for i in range(len(prompts))]


def stock(model: str, layer: int, hidden: int, settings: dict[str, Any]) -> Served:
    """Return an engine of stock vLLM, which ignores the workload."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, **settings)

    def run(_workload: str, prompts: list[list[int]], generated: int, _vectors: int) -> None:
        params = SamplingParams(max_tokens=generated, temperature=0, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)

    return Served(run, lambda: 0)


def ours(model: str, layer: int, hidden: int, settings: dict[str, Any]) -> Served:
    """Return an engine of this project."""
    from vllm_steer import LLM, SamplingParams

    llm: Any = LLM(model=model, enable_steering=True, **settings)

    @cache
    def steered(number: int) -> dict[str, Any]:
        return {"steering_vectors": {"post_block": {layer: vector(hidden, number)}}}

    captured = {"capture": {"memory": {"hooks": {"post_block": [layer]}, "positions": "all"}}}
    rows = 0

    def run(workload: str, prompts: list[list[int]], generated: int, vectors: int) -> None:
        nonlocal rows
        params = [
            SamplingParams(max_tokens=generated, temperature=0, ignore_eos=True, detokenize=False, **fields)
            for fields in in_turn(workload, prompts, vectors, captured, steered)
        ]
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
        results = [each.capture_results["memory"] for each in outputs if workload == WORKLOADS[0]]
        rows = sum(len(result.tensor("post_block", layer)) for result in results)

    return Served(run, lambda: rows)


def vllm_lens(model: str, layer: int, hidden: int, settings: dict[str, Any]) -> Served:
    """Return an engine of vllm-lens, a plug-in of vLLM."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm_lens import SteeringVector

    llm: Any = LLM(model=model, **settings)
    rows = 0

    @cache
    def steered(number: int) -> dict[str, Any]:
        row = torch.from_numpy(vector(hidden, number))[None]
        return {"apply_steering_vectors": [SteeringVector(activations=row, layer_indices=[layer])]}

    def run(workload: str, prompts: list[list[int]], generated: int, vectors: int) -> None:
        nonlocal rows
        params = [
            SamplingParams(max_tokens=generated, temperature=0, ignore_eos=True, detokenize=False, extra_args=fields)
            for fields in in_turn(workload, prompts, vectors, {"output_residual_stream": [layer]}, steered)
        ]
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
        rows = sum(each.activations["residual_stream"].shape[1] for each in outputs if workload == WORKLOADS[0])

    return Served(run, lambda: rows)


def interp_engine(model: str, layer: int, hidden: int, settings: dict[str, Any]) -> Served:
    """Return an engine of interp-engine with static taps at the layer, the faster of its two ways."""
    import torch
    from interp_engine import Address, load_model
    from interp_engine.steer_specs import AddSpec, LayerSteeringSpec, SteeringSpec
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    point, loop = Address("resid_post", layer), asyncio.new_event_loop()
    others = {name: value for name, value in settings.items()
              if name not in ("max_model_len", "gpu_memory_utilization", "skip_tokenizer_init")}  # fmt: skip
    loaded: Any = load_model(
        model, backend="vllm-static", dtype="bfloat16", static_points=[point], static_writes=[point],
        # It plans its buffers by this share of the memory, although the cache has a fixed size.
        max_model_len=settings["max_model_len"], gpu_memory_utilization=max(settings["gpu_memory_utilization"], 0.3),
        extra_vllm_kwargs=others,
    )  # fmt: skip
    loop.run_until_complete(loaded.warmup())
    rows = 0

    @cache
    def steered(number: int) -> dict[str, Any]:
        add = AddSpec(torch.from_numpy(vector(hidden, number)), 1.0)
        return {"steering_spec": SteeringSpec(layers={layer: LayerSteeringSpec(operations=[add])})}

    async def request(fields: dict[str, Any], prompt: list[int], generated: int) -> int:
        # FINAL_ONLY, as vLLM's LLM sets: it reads the last output only.
        params = SamplingParams(
            max_tokens=generated, temperature=0, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        found: dict[Any, Any] = {}
        more = {"capture_out": found} if "capture_points" in fields else {}
        await loaded.generate_steered(prompt, params, **fields, **more)
        return sum(len(each) for each in found.values())

    def run(workload: str, prompts: list[list[int]], generated: int, vectors: int) -> None:
        nonlocal rows
        fields = in_turn(workload, prompts, vectors, {"capture_points": [point]}, steered)

        async def batch() -> list[int]:
            return await asyncio.gather(
                *(request(own, each, generated) for own, each in zip(fields, prompts, strict=True))
            )

        rows = sum(loop.run_until_complete(batch()))

    return Served(run, lambda: rows)


PROJECTS: Mapping[str, Callable[[str, int, int, dict[str, Any]], Served]] = {
    "stock": stock, OURS: ours, LENS: vllm_lens, INTERP: interp_engine,
}  # fmt: skip


def serve(project: str, model: str, settings: dict[str, Any], pipe: Any) -> None:
    """Run an engine in a child process, as ``benchmarks.cost.serve`` does."""
    import gc
    import os
    import time

    os.environ["VLLM_PLUGINS"] = PLUGINS.get(project, "none")
    try:
        started = time.perf_counter()
        layer, hidden = settings.pop("layer"), settings.pop("hidden")
        served = PROJECTS[project](model, layer, hidden, settings)
        gc.collect()
        gc.freeze()
        pipe.send({"started": time.perf_counter() - started})
        while (command := pipe.recv()) is not None:
            workload, batch, prompt, generated, vectors = command
            prompts = [[(7 * i + j) % 1000 + 2 for j in range(prompt)] for i in range(batch)]
            gc.collect()
            began = time.perf_counter()
            served.run(workload, prompts, generated, vectors)
            seconds = time.perf_counter() - began
            wanted = batch * (prompt + generated - 1) if workload == WORKLOADS[0] and project != "stock" else 0
            rows = served.captured()
            problems = [f"{rows} rows captured instead of {wanted}"] if wanted and rows != wanted else []
            pipe.send({"seconds": seconds, "captured": rows, "problems": problems})
    except Exception:  # any failure ends this process; report it to the parent
        pipe.send({"failed": traceback.format_exc()})
    finally:
        # Some versions of vLLM (0.30) leave the engine's processes running, which would keep the GPU's memory.
        for child in multiprocessing.active_children():
            child.terminate()
            child.join(20)
            child.kill()


def absence(project: str) -> str | None:
    """Return why a project cannot be measured in this environment, or None."""
    if importlib.util.find_spec(MODULES[project]) is None:
        return "not installed"
    if project == LENS and importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    return None


def compare(
    one: Engine, other: Engine, workload: str, batch: int, vectors: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the seconds of alternating runs and the median ratio of tokens per second."""
    raw: dict[str, list[float]] = {"stock": [], "project": []}
    for repeat in range(arguments.repeats + 1):
        order = [("stock", one), ("project", other)]
        for who, engine in order if repeat % 2 else order[::-1]:
            seconds = engine.run(workload, batch, arguments.prompt, arguments.generated, vectors)
            if repeat:  # the first round is a warm-up
                raw[who].append(seconds)
    ratios = sorted(mine / theirs for mine, theirs in zip(raw["stock"], raw["project"], strict=True))
    return {"ratio": round(statistics.median(ratios), 4), "spread": [ratios[0], ratios[-1]], "seconds": raw}


def measure(project: str, result: dict[str, Any], model: str, arguments: argparse.Namespace) -> None:
    """Measure all rows of a project, and write the file after each."""
    shape = SHAPES[arguments.shape]
    settings: dict[str, Any] = {
        "load_format": "dummy", "seed": 0, "skip_tokenizer_init": True, "dtype": "bfloat16",
        "max_model_len": arguments.prompt + arguments.generated + 16, "max_num_seqs": 256,
        "max_num_batched_tokens": 8192, "enable_prefix_caching": False, "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": int(arguments.kv_gib * 2**30),
        "layer": shape["num_hidden_layers"] // 2, "hidden": shape["hidden_size"],
    }  # fmt: skip
    engines = [Engine(who, model, dict(settings), serve) for who in ("stock", project)]
    try:
        for engine in engines:
            engine.wait()
        cells = [(VECTORS, max(arguments.requests), count) for count in arguments.vectors]
        cells += [(workload, batch, 1) for batch in arguments.requests for workload in WORKLOADS]
        for workload, batch, vectors in cells:
            found = compare(engines[0], engines[1], workload, batch, vectors, arguments)
            row = {"project": project, "workload": workload, "requests": batch, "vectors": vectors, **found}
            result["rows"].append(row)
            write(result, arguments.out)
            print(project, workload, batch, vectors, found["ratio"], flush=True)
    finally:
        for engine in engines:
            engine.close()


def write(result: Mapping[str, Any], out: Path) -> None:
    out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--projects", nargs="+", choices=list(MODULES), default=list(MODULES))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--vectors", type=int, nargs="*", default=[1, 4, 16, 64, 256], help="numbers of vectors")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--generated", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-gib", type=float, default=4.8, help="key-value cache of each engine, in GiB")
    arguments = parser.parse_args()
    earlier = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    kept = [row for row in earlier.get("rows", ()) if row["project"] not in arguments.projects]
    result: dict[str, Any] = {
        "shape": arguments.shape, "environment": environment(),
        "setup": {"prompt": arguments.prompt, "generated": arguments.generated},
        "versions": earlier.get("versions", {}), "absent": earlier.get("absent", {}), "rows": kept,
    }  # fmt: skip
    for project in arguments.projects:
        result["absent"].pop(project, None)
        if (why := absence(project)) is not None:
            result["absent"][project] = why
            print(project, why, flush=True)
    write(result, arguments.out)
    with tempfile.TemporaryDirectory() as folder:
        save_model(arguments.shape, model := Path(folder) / arguments.shape)
        for project in arguments.projects:
            if project not in result["absent"]:
                result["versions"][project] = {name: package_version(name) for name in (project, "vllm", "torch")}
                try:
                    measure(project, result, str(model), arguments)
                except (RuntimeError, EOFError) as error:
                    lines = str(error).strip().splitlines() or [type(error).__name__]
                    result["absent"][project] = f"failed: {lines[-1][:300]}"
                    print(error, flush=True)
                write(result, arguments.out)
    if not any(row["project"] in arguments.projects for row in result["rows"]):
        raise SystemExit("benchmarks.peers_gpu: no project was measured")


if __name__ == "__main__":
    main()
