# SPDX-License-Identifier: Apache-2.0
"""Shrunk configurations keep the structure of the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from vllm_steer.testing.prove.reference import LAYERS, VOCAB, choose_layers, shrink


def shrunk(name: str, **settings: Any) -> Any:
    config = getattr(transformers, name)(**settings)
    shrink(config)
    return config


def test_keeps_each_kind_of_layer() -> None:
    """Catches a proof without any of the global-attention layers, of which there is one in six."""
    kinds = ["local"] * 5 + ["global"] + ["local"] * 5 + ["global"]
    assert choose_layers(kinds) == [0, 1, 2, 5]
    config = shrunk("Gemma3TextConfig")
    assert config.num_hidden_layers == LAYERS == len(config.layer_types)
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}


@pytest.mark.parametrize(
    ("name", "settings", "group"),
    [
        ("LlamaConfig", {"num_attention_heads": 32, "num_key_value_heads": 8}, 4),
        ("Qwen2Config", {"num_attention_heads": 28, "num_key_value_heads": 28}, 1),
        ("GemmaConfig", {"num_attention_heads": 8, "num_key_value_heads": 1}, 4),
        ("GPT2Config", {}, 1),
    ],
)
def test_keeps_head_size_and_groups(name: str, settings: dict[str, Any], group: int) -> None:
    """Catches a head size that no kernel supports, and grouped heads that become ungrouped."""
    before = getattr(transformers, name)(**settings)
    head = getattr(before, "head_dim", None) or before.hidden_size // before.num_attention_heads
    config = shrunk(name, **settings)
    assert config.hidden_size == config.num_attention_heads * head
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    assert config.num_attention_heads // kv_heads == group
    assert config.vocab_size == VOCAB


def test_keeps_experts() -> None:
    """Catches a mixture of experts that becomes dense, and one that routes to all experts."""
    config = shrunk("Qwen3MoeConfig", num_experts=128, num_experts_per_tok=8)
    assert (config.num_experts, config.num_experts_per_tok) == (4, 2)


def test_token_ids_are_inside_the_vocabulary() -> None:
    """Catches a model that cannot be built because its padding token is outside of its embeddings."""
    config = shrunk("LlamaConfig", vocab_size=128256, pad_token_id=128004, bos_token_id=128000)
    assert max(config.pad_token_id, config.bos_token_id) < VOCAB


def test_refuses_configurations_without_layers() -> None:
    """Catches an error that does not name the configuration."""
    with pytest.raises(ValueError, match="cannot be shrunk"):
        shrink(SimpleNamespace(hidden_size=8))
