# SPDX-License-Identifier: Apache-2.0
"""A tiny random Llama, saved once per test run, and its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

HIDDEN, LAYERS, VOCAB = 64, 4, 128


def save_tiny_llama(folder: Path, **overrides: Any) -> Path:
    """Random weights large enough that every sublayer matters; float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = dict(  # noqa: C408
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=False,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).float().save_pretrained(folder)
    return folder


def make_llm(folder: Path, **overrides: Any) -> Any:
    """An in-process engine with steering, eager and float32 unless told otherwise."""
    from vllm_steer import LLM

    settings: dict[str, Any] = dict(  # noqa: C408
        enable_steering=True, enforce_eager=True, dtype="float32", max_model_len=512, skip_tokenizer_init=True,
        disable_log_stats=True, max_logprobs=VOCAB, seed=0, max_num_seqs=128,
    )  # fmt: skip
    return LLM(model=str(folder), **{**settings, **overrides})


def direction(seed: int, scale: float = 5.0, hidden: int = HIDDEN) -> np.ndarray:
    """A random vector of a length comparable with the tiny model's stream."""
    return (np.random.default_rng(seed).standard_normal(hidden) * scale).astype("f4")
