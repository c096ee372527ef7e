# SPDX-License-Identifier: Apache-2.0
"""Number of kernels that the compiler generates for a decoder: stock, with taps, and with plain code in addition.

    python -m benchmarks.compiled --out benchmarks/results/compiled.json

Counts Inductor's kernels on a CPU for tiny bfloat16 models of real architectures with four layers. The ops of taps are
not counted as kernels. A tap adds a kernel if it prevents the compiler from fusing the code before and after it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.build import identity

LAYERS = 4
_SIZES = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2}
_ROTARY = {
    **_SIZES, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {**_ROTARY, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "Granite": {
        **_ROTARY, "architectures": ["GraniteForCausalLM"], "model_type": "granite", "residual_multiplier": 0.5,
    },
    "GPT-2": {
        **_SIZES, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": LAYERS,
        "n_head": 2, "n_positions": 64,
    },
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "stock vLLM": {},
    "with taps": {"enable_steering": True},
    "with taps, and plain": {"enable_steering": True, "steering_config": {"plain_code": True}},
}
"""Engine settings. The last ones compile both the tapped and the plain code."""


def count(model: dict[str, Any], settings: dict[str, Any], pipe: Any) -> None:
    """Start an engine in a child process and send the number of generated kernels through ``pipe``."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
        # Kernels from a cache would not be counted.
        VLLM_DISABLE_COMPILE_CACHE="1", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1",
    )  # fmt: skip
    from torch._inductor import metrics

    from vllm_steer import LLM

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        LLM(model=folder, load_format="dummy", dtype="bfloat16", max_model_len=64, skip_tokenizer_init=True, **settings)
    pipe.send(metrics.generated_kernel_count)


def counted(model: dict[str, Any], settings: dict[str, Any]) -> int:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=count, args=(model, settings, theirs))
    process.start()
    theirs.close()
    try:
        return int(ours.recv())
    finally:
        process.join(60)
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    found = {name: {kind: counted(model, given) for kind, given in KINDS.items()} for name, model in MODELS.items()}
    import torch
    import vllm

    environment = {"torch": torch.__version__, "vllm": vllm.__version__, **identity()}
    result = {"environment": environment, "layers": LAYERS, "kernels": found}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
