# SPDX-License-Identifier: Apache-2.0
"""The tiny models of the conformance tests: one row per architecture, built from HF's own classes.

Every model is the real architecture, shrunk to four layers of width 64, with random weights that are large
enough for each sublayer to matter: with HF's own initialisation (std 0.02) the blocks hardly touch the
stream, and an edit made one sublayer too late would look like one made in time.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

HIDDEN: Final = 64
LAYERS: Final = 4
VOCAB: Final = 128
MAX_POSITIONS: Final = 64
WEIGHT_STD: Final = 0.2
NORM_SPREAD: Final = 0.3


@dataclass(frozen=True)
class TinyModel:
    """One architecture: how to build it, where its blocks are in HF, and what the engine owes it.

    ``config`` is the name of the HF config class and ``settings`` its shrunken arguments; ``layer`` is the
    decoder-layer class that vLLM runs and ``recipe`` the family it belongs to, both as in the hook-point
    table. ``refused`` names the points where edits must be refused. ``steered`` False: the engine must refuse
    to start on this model, because no recipe is proven for it.

    The HF side: ``blocks`` is the path to the list of blocks, ``branch`` the module in a block whose output
    is the attention branch as it is added to the stream (times the config's field ``multiplier``), and
    ``reads_mid`` the module whose input is the stream between attention and MLP (None: there is no such
    place). ``attention`` names HF's attention code where its default is not the model.
    """

    name: str
    config: str
    settings: Mapping[str, Any]
    recipe: str
    layer: str
    blocks: str = "model.layers"
    branch: str = "self_attn"
    reads_mid: str | None = "post_attention_layernorm"
    multiplier: str | None = None
    refused: tuple[str, ...] = ()
    steered: bool = True
    attention: str | None = None

    def __str__(self) -> str:
        return self.name


# Two heads of 32: the smallest head that vLLM's CPU attention takes.
_WIDTHS: Final = {"hidden_size": HIDDEN, "num_attention_heads": 2, "num_hidden_layers": LAYERS}
_BASE: Final = {**_WIDTHS, "intermediate_size": 128}
_MQA: Final = {**_BASE, "num_key_value_heads": 1}
_GQA: Final = {**_BASE, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_GPT: Final = {"n_embd": HIDDEN, "n_head": 2, "n_layer": LAYERS, "n_positions": MAX_POSITIONS}
_OPT: Final = {**_WIDTHS, "ffn_dim": 128, "word_embed_proj_dim": HIDDEN}
_FALCON: Final = {**_WIDTHS, "ffn_hidden_size": 256, "bias": True}
_FULL: Final = {"sliding_window": None}
# Half of the layers see eight positions only, so that local and global attention both matter.
_LOCAL: Final = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
# vLLM lets Cohere 2 see one position more than HF does, so the window is wider than any test's sequence; its
# local layers still differ from the global ones: only they have rotary positions.
_COHERE2: Final = {**_LOCAL, "sliding_window": MAX_POSITIONS, "head_dim": 32}
_GEMMA: Final = {**_GQA, **_LOCAL, "query_pre_attn_scalar": 32}
_EXAONE: Final = {**_MQA, **_FULL, "layer_types": ["full_attention"] * LAYERS}
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LOCAL_EXPERTS: Final = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MULTIPLIERS: Final = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.15}

_PARALLEL: Final[dict[str, Any]] = {"reads_mid": None, "refused": ("post_attn",)}
_SANDWICH: Final[dict[str, Any]] = {
    "branch": "post_attention_layernorm",
    "reads_mid": "pre_feedforward_layernorm",
}
# HF's default attention leaves soft capping out.
_SOFT_CAPS: Final[dict[str, Any]] = {"attention": "eager"}
_POST_NORM: Final[dict[str, Any]] = {"branch": "post_attention_layernorm", "reads_mid": "mlp"}
_FALCON_AT: Final[dict[str, Any]] = {"blocks": "transformer.h", "branch": "self_attention"}
_NEOX_AT: Final[dict[str, Any]] = {"blocks": "gpt_neox.layers", "branch": "attention"}

# fmt: off
ZOO: Final[tuple[TinyModel, ...]] = (
    TinyModel("llama", "LlamaConfig", _GQA, "FUSED", "LlamaDecoderLayer"),
    TinyModel("mistral", "MistralConfig", {**_GQA, **_FULL}, "FUSED", "MistralDecoderLayer"),
    TinyModel("qwen2", "Qwen2Config", _MQA, "FUSED", "Qwen2DecoderLayer"),
    TinyModel("qwen3", "Qwen3Config", _GQA, "FUSED", "Qwen3DecoderLayer"),
    TinyModel("gemma", "GemmaConfig", _GQA, "FUSED", "GemmaDecoderLayer"),
    TinyModel("phi3", "Phi3Config", _BASE, "FUSED", "LlamaDecoderLayer"),
    TinyModel("nemotron", "NemotronConfig", _GQA, "FUSED", "NemotronDecoderLayer"),

    TinyModel("mixtral", "MixtralConfig", {**_GQA, **_LOCAL_EXPERTS}, "FUSED", "MixtralDecoderLayer"),
    TinyModel("qwen3_moe", "Qwen3MoeConfig", {**_GQA, **_EXPERTS}, "FUSED", "Qwen3MoeDecoderLayer"),
    TinyModel("qwen2_moe", "Qwen2MoeConfig", {**_MQA, **_EXPERTS, "shared_expert_intermediate_size": 64},
              "FUSED", "Qwen2MoeDecoderLayer"),
    TinyModel("olmoe", "OlmoeConfig", {**_BASE, **_EXPERTS}, "FUSED", "OlmoeDecoderLayer"),

    TinyModel("gemma2", "Gemma2Config", _GEMMA, "FUSED", "Gemma2DecoderLayer", **_SANDWICH, **_SOFT_CAPS),
    TinyModel("gemma3", "Gemma3TextConfig", _GEMMA, "FUSED", "Gemma3DecoderLayer", **_SANDWICH),
    TinyModel("glm4", "Glm4Config", _GQA, "FUSED", "Glm4DecoderLayer",
              branch="post_self_attn_layernorm"),
    TinyModel("exaone4", "Exaone4Config", _EXAONE, "UNFUSED+POSTNORM", "Exaone4DecoderLayer",
              **_POST_NORM),

    TinyModel("gpt2", "GPT2Config", _GPT, "UNFUSED", "GPT2Block",
              blocks="transformer.h", branch="attn", reads_mid="ln_2"),
    TinyModel("opt", "OPTConfig", _OPT, "UNFUSED", "OPTDecoderLayer",
              blocks="model.decoder.layers", reads_mid="final_layer_norm"),
    TinyModel("opt_post_ln", "OPTConfig", {**_OPT, "do_layer_norm_before": False},
              "UNFUSED", "OPTDecoderLayer", blocks="model.decoder.layers", reads_mid="self_attn_layer_norm",
              steered=False),
    TinyModel("stablelm", "StableLmConfig", {**_MQA, "use_qkv_bias": True}, "UNFUSED", "StablelmDecoderLayer"),
    TinyModel("falcon_rw", "FalconConfig",
              {**_FALCON, "num_kv_heads": 2, "multi_query": False, "parallel_attn": False, "alibi": True},
              "UNFUSED", "FalconDecoderLayer", **_FALCON_AT, steered=False),

    TinyModel("granite", "GraniteConfig", {**_MQA, **_MULTIPLIERS}, "UNFUSED*MULT", "GraniteDecoderLayer",
              multiplier="residual_multiplier"),
    TinyModel("granitemoe", "GraniteMoeConfig", {**_MQA, **_MULTIPLIERS, **_LOCAL_EXPERTS},
              "UNFUSED*MULT", "GraniteMoeDecoderLayer", multiplier="residual_multiplier"),

    TinyModel("falcon", "FalconConfig", {**_FALCON, "num_kv_heads": 1}, "PARALLEL", "FalconDecoderLayer",
              **_FALCON_AT, **_PARALLEL),
    TinyModel("falcon_new", "FalconConfig", {**_FALCON, "num_kv_heads": 1, "new_decoder_architecture": True},
              "PARALLEL", "FalconDecoderLayer", **_FALCON_AT, **_PARALLEL),
    TinyModel("cohere", "CohereConfig", {**_MQA, "logit_scale": 1.0}, "PARALLEL", "CohereDecoderLayer",
              **_PARALLEL),
    TinyModel("cohere2", "Cohere2Config", {**_MQA, **_COHERE2, "logit_scale": 1.0},
              "PARALLEL", "CohereDecoderLayer", **_PARALLEL),
    TinyModel("gptj", "GPTJConfig", {**_GPT, "rotary_dim": 16}, "PARALLEL", "GPTJBlock",
              blocks="transformer.h", branch="attn", **_PARALLEL),

    # These run on vLLM's Transformers backend: the layer classes are HF's.
    TinyModel("gpt_neox", "GPTNeoXConfig", _BASE, "PARALLEL", "GPTNeoXLayer", **_NEOX_AT, **_PARALLEL),
    TinyModel("gpt_neox_seq", "GPTNeoXConfig", {**_BASE, "use_parallel_residual": False},
              "UNFUSED", "GPTNeoXLayer", **_NEOX_AT, steered=False),
    TinyModel("phi", "PhiConfig", _MQA, "PARALLEL", "PhiDecoderLayer", **_PARALLEL),
    TinyModel("olmo", "OlmoConfig", _BASE, "UNFUSED", "OlmoDecoderLayer"),
    TinyModel("olmo2", "Olmo2Config", _BASE, "UNFUSED+POSTNORM", "Olmo2DecoderLayer",
              **_POST_NORM),
    TinyModel("starcoder2", "Starcoder2Config", _MQA, "UNFUSED", "Starcoder2DecoderLayer"),
    TinyModel("smollm3", "SmolLM3Config", _MQA, "UNFUSED", "SmolLM3DecoderLayer"),
)
# fmt: on

BY_NAME: Final[Mapping[str, TinyModel]] = {tiny.name: tiny for tiny in ZOO}


def config_of(tiny: TinyModel) -> PretrainedConfig:
    """The HF config of a row, with special tokens that lie inside the small vocabulary."""
    common = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if "n_positions" not in tiny.settings:
        common["max_position_embeddings"] = MAX_POSITIONS
    return getattr(transformers, tiny.config)(**common, **tiny.settings)


def build(tiny: TinyModel) -> PreTrainedModel:
    """The row's model in float32 with seeded random weights, in evaluation mode."""
    seed = zlib.crc32(tiny.name.encode())
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config_of(tiny), dtype=torch.float32, attn_implementation=tiny.attention
    )
    _randomise(model, torch.Generator().manual_seed(seed))
    return model.eval()


def save(tiny: TinyModel, folder: Path) -> Path:
    """Write the row's model (config.json and safetensors) under ``folder``, once, and return its path."""
    path = folder / tiny.name
    if not (path / "config.json").exists():
        build(tiny).save_pretrained(path)
    return path


@torch.no_grad()
def _randomise(model: PreTrainedModel, generator: torch.Generator) -> None:
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim > 1 or name.endswith("bias"):
            weight.copy_(WEIGHT_STD * noise)
        else:
            # Norms, around their neutral value: 1 in most models, 0 in those that multiply by 1 + weight.
            weight.add_(NORM_SPREAD * noise.clamp(-1.0, 1.0))
