# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, and steered engines for them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vllm_steer.points import POINT_NAMES, PointName
from vllm_steer.testing.fuzz.model import save_tiny_llama as save_tiny_llama
from vllm_steer.testing.heap import cheap_collections

HIDDEN, LAYERS, VOCAB = 64, 4, 128
CPU_BLOCK = 128
"""Tokens of a cache block that vLLM chooses on a CPU."""


def code_of(point: PointName, layer: int, *, before: bool = False) -> int:
    """Return the transfer code of a captured row: the number of its site, and whether it was read before its edits."""
    return 2 * (len(POINT_NAMES) * layer + POINT_NAMES.index(point)) + before


BF16_MODEL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 512, "initializer_range": 0.08,
}  # fmt: skip
"""Settings with which rounding to bfloat16 does not change the attention pattern."""
BF16_BOUND = 0.08
"""Largest distance of a bfloat16 row from HF's, in lengths of HF's row; the two sum in different orders."""


def save_tiny_moe(folder: Path, **overrides: Any) -> Path:
    """Save a Qwen3 mixture of 8 experts with random float32 weights, as wide and deep as the tiny Llama."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**settings, **overrides})).float().save_pretrained(folder)
    return folder


FEATURES = 50


def save_autoencoder(folder: Path) -> Path:
    """Save a JumpReLU autoencoder with random float32 weights for the tiny models."""
    random = np.random.default_rng(8)
    arrays = {
        "W_enc": random.standard_normal((HIDDEN, FEATURES)),
        "W_dec": random.standard_normal((FEATURES, HIDDEN)),
        "b_enc": random.standard_normal(FEATURES),
        "b_dec": np.ones(HIDDEN),
        "threshold": np.full(FEATURES, 0.1),
    }
    folder.mkdir(exist_ok=True)
    np.savez(folder / "params.npz", **{name: array.astype(np.float32) for name, array in arrays.items()})
    return folder


_until_exit = ExitStack()


@cache
def _skip_loaded_modules() -> None:
    """Make collections cheap for the rest of this process; only the first call does it, ahead of the first engine."""
    _until_exit.enter_context(cheap_collections())


def register_class(architecture: str) -> None:
    """Register a class that vLLM knows by name only, which it would inspect in a process of ten seconds."""
    from vllm import ModelRegistry

    known = ModelRegistry.models.get(architecture)
    if known is not None and hasattr(known, "module_name"):
        ModelRegistry.register_model(architecture, known.load_model_cls())


def llm_settings(**overrides: Any) -> dict[str, Any]:
    """Return the arguments of ``LLM`` for a tiny model; eager and float32 by default."""
    import torch

    settings: dict[str, Any] = dict(  # noqa: C408
        enforce_eager=True, dtype="float32", max_model_len=512, skip_tokenizer_init=True,
        disable_log_stats=True, max_logprobs=VOCAB, seed=0, max_num_seqs=128,
    )  # fmt: skip
    if not torch.cuda.is_available():
        # Room for all requests at their full length; filling a whole GiB with zeros takes longer than all else.
        settings["num_gpu_blocks_override"] = 128 * 512 // overrides.get("block_size", CPU_BLOCK)
    return {**settings, **overrides}


def make_llm(folder: Path, **overrides: Any) -> Any:
    """Return an in-process engine with steering; see `llm_settings`."""
    from vllm_steer import LLM

    register_class(json.loads((Path(folder) / "config.json").read_text())["architectures"][0])
    _skip_loaded_modules()
    return LLM(model=str(folder), **llm_settings(**{"enable_steering": True, **overrides}))


def forget_engine(*, compiled: bool) -> None:
    """Undo what an engine that has shut down leaves in this process: its groups of ranks, variables, compiled code.

    Its code runs without guards, so another engine of the same class would run it. It is kept after an eager engine,
    since it includes the functions of vLLM's sampler.
    """
    import torch
    from vllm import envs
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    envs.disable_envs_cache()
    if compiled:
        torch._dynamo.reset()


def direction(seed: int, scale: float = 5.0, hidden: int = HIDDEN) -> np.ndarray:
    """Return a random vector about as long as the tiny model's stream."""
    return (np.random.default_rng(seed).standard_normal(hidden) * scale).astype("f4")
