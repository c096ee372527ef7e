# SPDX-License-Identifier: Apache-2.0
"""Random LoRA adapters of the tiny model, and HF models with an adapter merged into the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 4, 8
_MODULES = {"self_attn.o_proj": (64, 64), "mlp.down_proj": (128, 64)}


def save_adapter(folder: Path, seed: int, layers: int = 4) -> Path:
    """Save an adapter in PEFT's format, large enough to change the output."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for name, (width_in, width_out) in _MODULES.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, width_in, generator=generator) * 0.1
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(width_out, RANK, generator=generator) * 0.5
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [name.split(".")[1] for name in _MODULES]
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


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
