# SPDX-License-Identifier: Apache-2.0
"""Shapes of the benchmarked models: real configurations, random weights, no tokenizer."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.build import identity

_COMMON: dict[str, Any] = {"dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu"}

SHAPES: dict[str, dict[str, Any]] = {
    # Runs on a CPU, to try a script.
    "tiny": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048,
        "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 16384, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 16384, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "tie_word_embeddings": False, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "granite-4-tiny": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 1536,
        "intermediate_size": 512, "shared_intermediate_size": 1024, "num_local_experts": 62, "num_experts_per_tok": 6,
        "num_hidden_layers": 40, "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 100352,
        "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
        "mamba_n_heads": 48, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_head": 64, "mamba_d_conv": 4,
        "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False,
        "position_embedding_type": "nope", "max_position_embeddings": 16384, "rms_norm_eps": 1e-5,
        "embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.0078125, "tie_word_embeddings": True,
    },
    "gemma3-27b": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 5376,
        "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128, "vocab_size": 262208, "max_position_embeddings": 16384, "sliding_window": 1024,
        "sliding_window_pattern": 6, "query_pre_attn_scalar": 168, "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
}  # fmt: skip


def save_shape(name: str, folder: Path) -> Path:
    """Write the ``config.json`` of a shape. vLLM creates the weights (``load_format="dummy"``)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**_COMMON, **SHAPES[name]}))
    return folder


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Return the date, the GPU, the package versions and the code, on which results depend."""
    import torch
    import triton
    import vllm

    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "gpus": torch.cuda.device_count() if cuda else 0,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vllm": vllm.__version__,
        "cuda": torch.version.cuda,
        **identity(),
    }
