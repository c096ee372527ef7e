# SPDX-License-Identifier: Apache-2.0
"""Random LoRA adapters of the tiny models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def save_adapter(
    folder: Path, seed: int, widths: Mapping[str, tuple[int, int]], rank: int, alpha: int, *, layers: int, scale: float
) -> Path:
    """Save a random adapter in PEFT's format.

    Args:
        folder: Where to; created.
        seed: Seed of the weights.
        widths: Input and output width of each adapted module.
        rank: Rank of the adapter.
        alpha: PEFT's ``lora_alpha``.
        layers: Number of layers of the model.
        scale: Standard deviation of the second factor: large enough to change the model's output.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for name, (width_in, width_out) in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, width_in, generator=generator) * 0.1
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(width_out, rank, generator=generator) * scale
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none",
        "target_modules": [name.split(".")[1] for name in widths],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
