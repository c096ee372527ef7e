# SPDX-License-Identifier: Apache-2.0
"""Combine vLLM's LoRA adapters with steering: every request of one batch has its own adapter and its own vector.

    python examples/lora_and_steering.py [MODEL [ADAPTER]]

Without an adapter, the script creates a random one that fits the demo model.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from vllm_steer import LLM, SamplingParams

RANK = 8


def random_adapter(model: str, folder: Path) -> Path:
    """Write a random LoRA adapter for the attention outputs of a Llama in PEFT's format."""
    config = json.loads(Path(model, "config.json").read_text())
    hidden = config["hidden_size"]
    width = config["num_attention_heads"] * config.get("head_dim", hidden // config["num_attention_heads"])
    torch.manual_seed(0)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, width) * 0.1
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(hidden, RANK) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none", "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def main(model: str = "demo/model", adapter: str | None = None) -> None:
    path = adapter or str(random_adapter(model, Path(tempfile.mkdtemp())))
    llm = LLM(model=model, enable_steering=True, enforce_eager=True, enable_lora=True, max_loras=2, max_lora_rank=RANK)
    direction = np.random.default_rng(0).standard_normal(llm.model_config.get_hidden_size())

    plain = SamplingParams(temperature=0, max_tokens=16)
    steered = SamplingParams(temperature=0, max_tokens=16, steering_vectors={"post_block": {1: direction * 8}})
    lora = LoRARequest("example", 1, path)
    requests = {
        "plain": (plain, None),
        "steered": (steered, None),
        "adapter": (plain, lora),
        "adapter and steered": (steered, lora),
    }
    outputs = llm.generate(
        ["Once upon a time"] * len(requests),
        [params for params, _ in requests.values()],
        lora_request=[lora for _, lora in requests.values()],
    )
    for label, output in zip(requests, outputs, strict=True):
        print(f"{label}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
