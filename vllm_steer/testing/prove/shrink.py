# SPDX-License-Identifier: Apache-2.0
"""Shrink a model's configuration to a few narrow layers that still include each kind of layer.

Only sizes with a known meaning change. The head size, positions, norms, multipliers and layer patterns stay, and so
does the ratio of hidden size and heads.
"""

from __future__ import annotations

from typing import Any

LAYERS = 4
VOCAB = 128
_HEADS = ("num_attention_heads",)
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_WIDTHS = (
    "intermediate_size",
    "ffn_hidden_size",
    "ffn_dim",
    "n_inner",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "expert_ffn_hidden_size",
)
_WIDTH = 128
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_GROUPS = ("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id")
_MINIMA = {**dict.fromkeys(_EXPERTS, 4), **dict.fromkeys(_CHOSEN, 2), **dict.fromkeys(_GROUPS, 1)}


def shrink(config: Any) -> None:
    """Shrink an HF text configuration in place.

    Raises:
        ValueError: The configuration has no number of layers, hidden size or number of heads.
    """
    try:
        layers, hidden, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    except AttributeError as error:
        raise ValueError(f"the configuration cannot be shrunk: {error}") from None
    head = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = next((value for name in _KV_HEADS if (value := getattr(config, name, None))), heads)
    group = max(1, heads // kv_heads)
    few = 2 if group == 1 else 4
    _shorten(config, layers)
    config.hidden_size = few * head
    for name in _HEADS:
        _set(config, name, few)
    for name in _KV_HEADS:
        _set(config, name, max(1, few // min(group, few)))
    for name in _WIDTHS:
        if isinstance(getattr(config, name, None), int):
            _set(config, name, _WIDTH)
    for name, least in _MINIMA.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and value > least:
            _set(config, name, least)
    config.vocab_size = VOCAB
    for name in _TOKENS:
        if getattr(config, name, None) is not None:
            setattr(config, name, 0)
    for name in ("word_embed_proj_dim", "hidden_size_per_layer_input"):
        if isinstance(getattr(config, name, None), int):
            _set(config, name, config.hidden_size)
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def choose_layers(kinds: list[Any], count: int = LAYERS) -> list[int]:
    """Return the layers to keep, ascending: the first of each kind, then the first of the others."""
    first = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    rest = [index for index in range(len(kinds)) if index not in first]
    return sorted((first + rest)[:count])


def _shorten(config: Any, layers: int) -> None:
    """Keep a few layers, and their entries in every list that has one entry per layer."""
    lists = {
        name: value for name, value in vars(config).items() if isinstance(value, (list, tuple)) and len(value) == layers
    }
    kept = choose_layers([repr(kinds) for kinds in zip(*lists.values(), strict=True)] or [""] * layers)
    config.num_hidden_layers = len(kept)
    for name, value in lists.items():
        setattr(config, name, [value[index] for index in kept])


def _set(config: Any, name: str, value: int) -> None:
    if hasattr(config, name):
        setattr(config, name, value)
