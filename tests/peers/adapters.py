# SPDX-License-Identifier: Apache-2.0
"""Random LoRA adapters of the tiny model, and HF models with an adapter merged into the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.adapters import save_adapter

RANK, ALPHA = 4, 8
MODULES = {"self_attn.o_proj": (64, 64), "mlp.down_proj": (128, 64)}


def save_random_adapter(folder: Path, seed: int, layers: int = 4) -> Path:
    """Save an adapter that is large enough to change the output."""
    return save_adapter(folder, seed, MODULES, RANK, ALPHA, layers=layers, scale=0.5)


def merged(model: Path, adapter: Path | None) -> Any:
    """Return the HF model with the adapter's product added to its weights."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tensors = {} if adapter is None else load_file(adapter / "adapter_model.safetensors")
    for name, weight in tensors.items():
        if ".lora_A." in name:
            module = hf.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            module.weight.data += ALPHA / RANK * tensors[name.replace("lora_A", "lora_B")] @ weight
    return hf
