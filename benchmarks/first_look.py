# SPDX-License-Identifier: Apache-2.0
"""A first look at cost on a GPU: time per output token and throughput, as ratios to stock vLLM on the same machine.

    python benchmarks/first_look.py --out benchmarks/results/first-look.json

Llama-8B shape with random weights, greedy, 16 tokens in. Stock and steered engines run one after another in processes
of their own; within the steered one, variants alternate and the median of the repeats counts. It says where the work
for speed begins, not what the product promises.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BATCHES = (1, 32, 128)
PROMPT, GENERATED, REPEATS = 16, 128, 4


def variants() -> dict[str, dict[str, Any]]:
    """Request fields of each variant of the steered engine."""
    import numpy as np

    rng = np.random.default_rng(0)
    vector = (rng.standard_normal(4096) * 0.01).astype("f4")
    points = ("pre_attn", "post_attn", "post_block")
    memory = {"hooks": {"post_block": [16]}, "positions": "all"}
    return {
        "idle": {},
        "one site steered": {"steering_vectors": {"post_block": {16: vector}}},
        "96 sites steered": {"steering_vectors": {p: dict.fromkeys(range(32), vector) for p in points}},
        "capture one layer, all tokens": {"capture": {"memory": memory}},
        "capture all layers, last prompt token": {
            "capture": {"memory": {"hooks": {"post_block": "all"}, "positions": "last_prompt"}}
        },
    }


def measure(steered: bool, model: str) -> dict[str, Any]:
    """Seconds per output token of every variant and batch size, all repeats."""
    if steered:
        from vllm_steer import LLM, SamplingParams

        extra: dict[str, Any] = {"enable_steering": True}
        chosen = variants()
    else:
        from vllm import LLM, SamplingParams

        extra, chosen = {}, {"stock": {}}
    llm = LLM(
        model=model, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=128,
        enable_prefix_caching=False, seed=0, **extra,
    )  # fmt: skip
    times: dict[str, dict[int, list[float]]] = {name: {batch: [] for batch in BATCHES} for name in chosen}
    for repeat in range(REPEATS + 1):
        for name, fields in chosen.items():
            for batch in BATCHES:
                prompts = [{"prompt_token_ids": [(7 * i + j) % 1000 + 2 for j in range(PROMPT)]} for i in range(batch)]
                params = SamplingParams(
                    max_tokens=GENERATED, temperature=0, ignore_eos=True, detokenize=False, **fields
                )
                started = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                if repeat:
                    times[name][batch].append((time.perf_counter() - started) / GENERATED)
    return {name: {str(batch): found for batch, found in each.items()} for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=["stock", "steered"])
    parser.add_argument("--model")
    arguments = parser.parse_args()
    if arguments.only:
        arguments.out.write_text(json.dumps(measure(arguments.only == "steered", arguments.model)))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(SHAPE))
        seconds: dict[str, Any] = {}
        for only in ("stock", "steered"):
            part = Path(folder, only)
            command = [sys.executable, __file__, "--only", only, "--model", str(model), "--out", str(part)]
            subprocess.run(command, check=True)
            seconds.update(json.loads(part.read_text()))
    medians = {name: {b: statistics.median(found) for b, found in each.items()} for name, each in seconds.items()}
    ratios = {name: {b: each[b] / medians["stock"][b] for b in each} for name, each in medians.items()}
    import torch
    import triton
    import vllm

    environment = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "vllm": vllm.__version__, "cuda": torch.version.cuda,
    }  # fmt: skip
    result = {"environment": environment, "seconds_per_token": seconds, "ratio_to_stock": ratios}
    arguments.out.write_text(json.dumps(result, indent=1))
    for name, each in ratios.items():
        print(f"{name:40}", *(f"{b}: {each[b]:.3f} ({1000 * medians[name][b]:.2f} ms)" for b in each))


if __name__ == "__main__":
    main()
