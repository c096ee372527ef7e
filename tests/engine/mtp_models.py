# SPDX-License-Identifier: Apache-2.0
"""Tiny targets with multi-token-prediction (MTP) layers, and the same targets as HF Transformers loads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from tests.conformance.shard import selected
from tests.tiny import HIDDEN, LAYERS, VOCAB

Weights = dict[str, torch.Tensor]
_BASE: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
_EXPERTS: Final[Mapping[str, Any]] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip

BRANCHES: Final = 0.1
"""Factor of the branches' last weights. The next token then depends mostly on the one before it and on edits, so that
drafts are often right and often wrong."""
STREAM: Final = 0.6
"""Share of the stream in what an MTP layer reads."""
_BRANCH_OUTPUTS: Final = ("o_proj.weight", "down_proj.weight", "down_proj")


EVERY_RUN: Final = ("mimo", "glm4_moe")
"""Families that every run proves: dense layers that hand over the stream itself, and experts behind the final norm."""


@dataclass(frozen=True)
class MTPModel:
    """One family: the target in HF Transformers, and its MTP layer in the checkpoint.

    Args:
        drafter: vLLM's name of the MTP layers' architecture.
        config: Name of HF's config class of the target.
        layer: Class of the MTP layer's decoder layer in vLLM.
        settings: Arguments of the config class.
        more: What the checkpoint's config has besides.
        block: Prefix of the weights of the MTP layer's decoder layer.
        extra_prefix: Prefix of the next names.
        extra: Names of the weights of its norms, and of the projection of token and stream.
        stream_first: Whether the projection reads the stream ahead of the token.
        own_head: Whether the MTP layer has an embedding and a head of its own.
        copies: Layer of the target whose weights the MTP layer has.
    """

    drafter: str
    config: str
    layer: str
    settings: Mapping[str, Any]
    more: Mapping[str, Any]
    block: str
    extra_prefix: str
    extra: tuple[str, ...]
    stream_first: bool = False
    own_head: bool = False
    copies: int = LAYERS - 1


_ONE: Final = {"num_nextn_predict_layers": 1}
_BEHIND: Final = f"model.layers.{LAYERS}."
_SHARED_HEAD: Final = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight", "eh_proj.weight")
_MIMO: Final = (
    "token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight", "input_proj.weight",
)  # fmt: skip
_ERNIE: Final = ("mtp_emb_norm.0.weight", "mtp_hidden_norm.0.weight", "mtp_linear_proj.0.weight")
MODELS: Final[Mapping[str, MTPModel]] = {
    "mimo": MTPModel(
        "MiMoMTPModel", "Qwen2Config", "Qwen2DecoderLayer", {},
        {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", **_ONE},
        "model.mtp_layers.0.", "model.mtp_layers.0.", _MIMO, stream_first=True,
    ),
    "glm4_moe": MTPModel(
        "Glm4MoeMTPModel", "Glm4MoeConfig", "Glm4MoeDecoderLayer", _EXPERTS, _ONE, _BEHIND, _BEHIND, _SHARED_HEAD,
        own_head=True,
    ),
    "ernie4_5_moe": MTPModel(
        "ErnieMTPModel", "Ernie4_5_MoeConfig", "LlamaDecoderLayer",
        {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1}, _ONE,
        "model.mtp_block.0.", "model.", _ERNIE, copies=0,
    ),
}  # fmt: skip


_BFLOAT16: Final = (
    "on a CPU, the recurrent layers of its target compute in bfloat16 only, and round otherwise with drafts: {count} "
    "of 16 greedy texts of 20 tokens differ, from tokens on whose best two log-probabilities are less than 0.2 apart"
)
NOT_COMPARABLE: Final[Mapping[str, str]] = {
    "DeepSeekMTPModel": "greedy texts differ",
    "Qwen3NextMTP": _BFLOAT16.format(count=3),
    "Qwen3_5MTP": _BFLOAT16.format(count=4),
}
"""Drafters with which vLLM 0.32 on a CPU answers otherwise than without, also without steering, and how."""


def save(model: MTPModel, folder: Path) -> Path:
    """Save the target with its MTP layer, and the target alone in ``folder / "hf"``; return the folder."""
    import transformers

    alone = folder / "hf"
    torch.manual_seed(0)
    config = getattr(transformers, model.config)(**{**_BASE, **model.settings})
    target = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if name.endswith(_BRANCH_OUTPUTS):
                weight *= BRANCHES
    target.save_pretrained(alone)
    weights = load_file(alone / "model.safetensors")
    save_file(weights | _mtp_layer(model, weights), folder / "model.safetensors", metadata={"format": "pt"})
    saved = json.loads((alone / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**saved, **model.more}))
    return folder


def _mtp_layer(model: MTPModel, weights: Weights) -> Weights:
    """Return weights of an MTP layer: a layer of the target on the sum of the token's embedding and the stream."""
    prefix = f"model.layers.{model.copies}."
    made = {
        name.replace(prefix, model.block): weight.clone() for name, weight in weights.items() if name.startswith(prefix)
    }
    *norms, projection = model.extra
    made |= {f"{model.extra_prefix}{name}": torch.ones(HIDDEN) for name in norms}
    parts = [torch.eye(HIDDEN), STREAM * torch.eye(HIDDEN)]
    made[f"{model.extra_prefix}{projection}"] = torch.cat(parts[::-1] if model.stream_first else parts, dim=1)
    if model.own_head:
        made[f"{model.block}shared_head.head.weight"] = weights["lm_head.weight"].clone()
        made[f"{model.block}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    return made


PROVEN: Final = [name for name in MODELS if name in EVERY_RUN or selected(name)]
"""Families of this run."""
