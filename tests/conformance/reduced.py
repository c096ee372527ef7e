# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V3.2 as NVIDIA's GPUs run it, on CPU ranks: its layers reduce, add and norm in one function.

vLLM's class, its layers and that function are the real ones. ``stand_ins.py`` replaces the attention, and
:func:`kernel` FlashInfer's kernel, by what vLLM's own comments say that it does. Importing :class:`Worker` in a worker
prepares the process.
"""

from __future__ import annotations

import importlib
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from tests.conformance.model import HIDDEN, LAYERS, NORM_SPREAD, VOCAB, WEIGHT_STD

MODEL: Final = "vllm.models.deepseek_v32.nvidia.model"
KERNEL: Final = "REDUCED_NORM_KERNEL"
"""Environment variable: ``kernel`` uses the kernel, anything else lets vLLM fall back to its own steps."""
UNJOINED: Final = "REDUCED_NORM_UNJOINED"
"""Environment variable: leave vLLM's function alone, so that no tap runs behind the kernel."""
CALLS: list[int] = []
"""Number of ranks, for each call of the kernel in this process."""
_EXPERTS: Final = 4


def kernel(
    allreduce_in: torch.Tensor, residual: torch.Tensor, rms_gamma: torch.Tensor, rms_eps: float, world_size: int,
    norm_out: torch.Tensor, **settings: Any,
) -> None:  # fmt: skip
    """Write the complete stream into the branch's buffer and its norm into ``norm_out``, without the norm's module."""
    from vllm.distributed import tensor_model_parallel_all_reduce

    CALLS.append(world_size)
    stream = (tensor_model_parallel_all_reduce(allreduce_in) + residual).float()
    allreduce_in.copy_(stream)
    norm_out.copy_(stream * (stream.pow(2).mean(-1, keepdim=True) + rms_eps).rsqrt() * rms_gamma.float())


def prepare() -> ExitStack:
    """Make vLLM run the class for NVIDIA's GPUs in this process."""
    from vllm import ModelRegistry
    from vllm.models.common.ops import fused_allreduce_rms_norm as reducing

    from tests.conformance import stand_ins
    from vllm_steer.compat.wraps import load

    ModelRegistry.register_model("DeepseekV32ForCausalLM", load(f"{MODEL}:DeepseekV32ForCausalLM"))
    patches = [*stand_ins.replacements(MODEL)]
    if os.environ.get(KERNEL) == "kernel":
        patches += [
            (reducing, "_can_use_flashinfer", lambda hidden, size: (True, 1 << 20)),
            (reducing, "flashinfer_trtllm_fused_allreduce_norm", kernel),
        ]
    if os.environ.get(UNJOINED):
        patches.append((importlib.import_module("vllm_steer.models.install"), "install_joins", lambda joins: None))
    stack = ExitStack()
    for owner, name, value in patches:
        stack.enter_context(patch.object(owner, name, value))
    return stack


class Worker:
    """Extension of vLLM's worker."""

    prepared = prepare() if os.environ.get(KERNEL) else None

    def kernel_calls(self) -> int:
        """Return how often this rank has called the kernel."""
        return len(CALLS)


def save_checkpoint(folder: Path) -> Path:
    """Save a checkpoint with random weights, one dense layer and experts in the others."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(3)

    def matrix(*shape: int) -> torch.Tensor:
        return WEIGHT_STD * torch.randn(shape, generator=generator)

    def norm() -> torch.Tensor:
        return 1.0 + NORM_SPREAD * torch.randn(HIDDEN, generator=generator).clamp(-1.0, 1.0)

    def mlp(name: str, width: int) -> dict[str, torch.Tensor]:
        return {
            f"{name}.gate_proj.weight": matrix(width, HIDDEN),
            f"{name}.up_proj.weight": matrix(width, HIDDEN),
            f"{name}.down_proj.weight": matrix(HIDDEN, width),
        }

    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN)}
    weights["model.norm.weight"] = norm()
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        weights |= {f"{layer}.{name}.weight": norm() for name in ("input_layernorm", "post_attention_layernorm")}
        weights[f"{layer}.self_attn.qkv_proj.weight"] = matrix(3 * HIDDEN, HIDDEN)
        weights[f"{layer}.self_attn.o_proj.weight"] = matrix(HIDDEN, HIDDEN)
        if number == 0:
            weights |= mlp(f"{layer}.mlp", 128)
            continue
        weights[f"{layer}.mlp.gate.weight"] = matrix(_EXPERTS, HIDDEN)
        for expert in range(_EXPERTS):
            weights |= mlp(f"{layer}.mlp.experts.{expert}", 64)
        weights |= mlp(f"{layer}.mlp.shared_experts", 64)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config()))
    return folder


def _config() -> dict[str, Any]:
    from tests.conformance.no_reference import NO_REFERENCE, PLAIN

    row = next(tiny for tiny in NO_REFERENCE if tiny.name == "deepseek_v32")
    own = {"model_type": row.config, "architectures": [row.architecture], "topk_method": "greedy"}
    return {**PLAIN, **row.settings, **own}
