# SPDX-License-Identifier: Apache-2.0
"""Where the hook points are in each decoder-layer class: one row per class, proven by ``tests/conformance``.

A layer's stream reaches vLLM's code in one of two shapes:

* **pair**: ``(hidden_states, residual)``, added by the next fused add-norm. The taps edit the residual summand,
  which is complete on every tensor-parallel rank and keeps vLLM's all-reduce fusion matching.
* **single**: one tensor. ``post_attn`` is the tensor that enters the second norm; these layers keep that very tensor as
  their residual, so an edit in place reaches the MLP and the residual sum alike.

A class that is not in the table is refused when the engine starts: a tap in the wrong place gives fluent, wrong
answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

_VLLM = "vllm.model_executor.models."
_HF = "transformers.models."

PARALLEL = (
    "attention and MLP of {layer} run in parallel on the same input, so no edit between them can reach the MLP; "
    "use pre_attn or post_block"
)


@dataclass(frozen=True)
class Recipe:
    """How to reach the three points of one decoder-layer class.

    ``mid`` names the submodule that consumes the stream after attention (the mid tap stands in front of it), or is None
    where there is no such place; then ``no_mid`` says why. ``accepts`` returns the reason why a layer's own settings
    make it different from the class that was proven, or None.
    """

    layer: str
    shape: Literal["pair", "single"]
    mid: str | None
    no_mid: str = ""
    accepts: Callable[[nn.Module], str | None] = lambda layer: None


def _opt(layer: Any) -> str | None:
    if layer.do_layer_norm_before:
        return None
    return "do_layer_norm_before=False (OPT-350m) norms the stream itself; no recipe is proven for it"


def _falcon(layer: Any) -> str | None:
    if layer.config.new_decoder_architecture or layer.config.parallel_attn:
        return None
    return "parallel_attn=False (Falcon-RW) adds attention to the stream in place; no recipe is proven for it"


def _gpt_neox(layer: Any) -> str | None:
    if layer.use_parallel_residual:
        return None
    return "use_parallel_residual=False is a different block; no recipe is proven for it"


def _pair(module: str, layer: str, mid: str) -> Recipe:
    return Recipe(f"{_VLLM}{module}.{layer}", "pair", mid)


RECIPES: tuple[Recipe, ...] = (
    _pair("llama", "LlamaDecoderLayer", "post_attention_layernorm"),
    _pair("mistral", "MistralDecoderLayer", "post_attention_layernorm"),
    _pair("nemotron", "NemotronDecoderLayer", "post_attention_layernorm"),
    _pair("glm4", "Glm4DecoderLayer", "post_attention_layernorm"),
    _pair("olmoe", "OlmoeDecoderLayer", "post_attention_layernorm"),
    _pair("qwen2_moe", "Qwen2MoeDecoderLayer", "post_attention_layernorm"),
    _pair("mixtral", "MixtralDecoderLayer", "post_attention_layernorm"),
    _pair("qwen2", "Qwen2DecoderLayer", "post_attention_layernorm"),
    _pair("qwen3", "Qwen3DecoderLayer", "post_attention_layernorm"),
    _pair("qwen3_moe", "Qwen3MoeDecoderLayer", "post_attention_layernorm"),
    _pair("gemma", "GemmaDecoderLayer", "post_attention_layernorm"),
    _pair("gemma2", "Gemma2DecoderLayer", "pre_feedforward_layernorm"),
    _pair("gemma3", "Gemma3DecoderLayer", "pre_feedforward_layernorm"),
    Recipe(f"{_VLLM}gpt2.GPT2Block", "single", "ln_2"),
    Recipe(f"{_VLLM}opt.OPTDecoderLayer", "single", "final_layer_norm", accepts=_opt),
    Recipe(f"{_VLLM}granite.GraniteDecoderLayer", "single", "post_attention_layernorm"),
    Recipe(f"{_VLLM}granitemoe.GraniteMoeDecoderLayer", "single", "post_attention_layernorm"),
    Recipe(f"{_VLLM}stablelm.StablelmDecoderLayer", "single", "post_attention_layernorm"),
    Recipe(f"{_VLLM}exaone4.Exaone4DecoderLayer", "single", "mlp"),
    Recipe(f"{_HF}olmo.modeling_olmo.OlmoDecoderLayer", "single", "post_attention_layernorm"),
    Recipe(f"{_HF}olmo2.modeling_olmo2.Olmo2DecoderLayer", "single", "mlp"),
    Recipe(f"{_HF}starcoder2.modeling_starcoder2.Starcoder2DecoderLayer", "single", "post_attention_layernorm"),
    Recipe(f"{_HF}smollm3.modeling_smollm3.SmolLM3DecoderLayer", "single", "post_attention_layernorm"),
    Recipe(f"{_VLLM}falcon.FalconDecoderLayer", "single", None, PARALLEL, accepts=_falcon),
    Recipe(f"{_VLLM}commandr.CohereDecoderLayer", "single", None, PARALLEL),
    Recipe(f"{_VLLM}gpt_j.GPTJBlock", "single", None, PARALLEL),
    Recipe(f"{_HF}gpt_neox.modeling_gpt_neox.GPTNeoXLayer", "single", None, PARALLEL, accepts=_gpt_neox),
    Recipe(f"{_HF}phi.modeling_phi.PhiDecoderLayer", "single", None, PARALLEL),
)
BY_LAYER: dict[str, Recipe] = {recipe.layer: recipe for recipe in RECIPES}


def qualified_name(layer: nn.Module) -> str:
    cls = type(layer)
    return f"{cls.__module__}.{cls.__qualname__}"
