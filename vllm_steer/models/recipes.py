# SPDX-License-Identifier: Apache-2.0
"""Where the hook points are in each decoder-layer class: one row per class, proven by ``tests/conformance``.

A layer's stream reaches vLLM's code in one of two shapes:

* **pair**: ``(hidden_states, residual)``, added by the next fused add-norm. The taps edit the residual summand,
  which is complete on every tensor-parallel rank and keeps vLLM's all-reduce fusion matching.
* **single**: one tensor. ``post_attn`` is the tensor that enters the second norm; these layers keep that very tensor as
  their residual, so an edit in place reaches the MLP and the residual sum alike.

Blocks that compute attention and MLP side by side never hold the stream after attention. It can be read there, as the
block's input plus the attention branch, and not edited.

A class that is not in the table is refused when the engine starts: a tap in the wrong place gives fluent, wrong
answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from vllm_steer.models.layers import AWAITING, INHERITED, PAIR, SINGLE, TRANSFORMERS

_VLLM = "vllm.model_executor.models."
_HF = "transformers.models."

PARALLEL = (
    "attention and MLP of {layer} run in parallel on the same input, so no edit between them can reach the MLP; "
    "use pre_attn or post_block"
)
TWO_ATTENTIONS = (
    "{layer} has two attentions and two MLPs, with a mixture of experts beside them, so there is no one stream between "
    "attention and MLP; use pre_attn or post_block"
)
PARTIAL = (
    "under tensor parallelism {layer} adds its attention up over the ranks together with the MLP, so no rank has the "
    "stream after attention; use pre_attn or post_block"
)


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def _plus_bias(out: Any) -> Any:
    """Falcon's attention leaves its bias, if it has one, to the block."""
    return out[0] if out[1] is None else out[0] + out[1]


@dataclass(frozen=True)
class Branch:
    """The attention branch of a parallel block: the submodule, and what of its output is added to the stream.

    ``partial``: under tensor parallelism each rank has a part of the sum, which the block adds up with the MLP's.
    """

    module: str
    partial: bool = False
    added: Callable[[Any], Any] = _first


@dataclass(frozen=True)
class Recipe:
    """How to reach the three points of one decoder-layer class.

    ``mid`` names the submodule that consumes the stream after attention (the mid tap stands in front of it; or
    ``ENTRY`` or ``EXIT``), or is None where there is no such place; then ``no_mid`` says why, and ``branch`` is what a
    read there adds to the block's input (None: the point cannot be read either). ``accepts`` returns the reason why a
    layer's own settings make it different from the class that was proven, or None. ``variant`` gives what differs, by
    field, where a class is several blocks in one.
    """

    layer: str
    shape: Literal["pair", "single"]
    mid: str | None
    no_mid: str = ""
    branch: Branch | None = None
    accepts: Callable[[nn.Module], str | None] = lambda layer: None
    variant: Callable[[Any], Mapping[str, Any]] = lambda layer: {}

    def of(self, layer: nn.Module) -> Recipe:
        """The recipe of this very layer, with its variant settled."""
        return replace(self, **self.variant(layer))

    def not_edited(self, layer: nn.Module) -> str | None:
        """Why edits at ``post_attn`` are refused on this layer, or None."""
        return self.no_mid.format(layer=type(layer).__name__) if self.mid is None else None

    def not_read(self, layer: nn.Module, tensor_parallel: bool) -> str | None:
        """Why reads at ``post_attn`` are refused on this layer, or None."""
        if self.branch is None:
            return self.not_edited(layer)
        if self.branch.partial and tensor_parallel:
            return PARTIAL.format(layer=type(layer).__name__)
        return None


_SEQUENTIAL: Mapping[str, Any] = {"mid": "post_attention_layernorm", "no_mid": "", "branch": None}


def _opt(layer: Any) -> Mapping[str, Any]:
    # OPT-350m norms the sum itself, and keeps what the norm gives: an edit in front of that norm reaches both.
    return {} if layer.do_layer_norm_before else {"mid": "self_attn_layer_norm"}


def _falcon(layer: Any) -> Mapping[str, Any]:
    return {} if layer.config.new_decoder_architecture or layer.config.parallel_attn else _SEQUENTIAL


def _gpt_neox(layer: Any) -> Mapping[str, Any]:
    return {} if layer.use_parallel_residual else _SEQUENTIAL


def _olmo_hybrid(layer: Any) -> Mapping[str, Any]:
    return {} if layer.layer_type == "linear_attention" else {"mid": "mlp"}


def _openpangu(layer: Any) -> Mapping[str, Any]:
    return {"mid": "pre_mlp_layernorm"} if layer.sandwich_norm else {}


def _post_norm_residual(layer: Any) -> str | None:
    if not layer.apply_residual_connection_post_layernorm:
        return None
    return "apply_residual_connection_post_layernorm=True, which keeps the normed input in the place of the stream"


def _scaled_in_float16(layer: Any) -> str | None:
    # The norm has the stream's dtype, whatever quantised weights have.
    if layer.input_layernorm.weight.dtype is torch.float16 and layer.routed_scaling_factor not in (None, 1):
        return "dtype=float16, in which it scales the stream by 1 / routed_scaling_factor; use bfloat16"
    return _sequence_parallel(layer)


def _sequence_parallel(layer: Any) -> str | None:
    for name in ("use_sequence_parallel_moe", "use_attn_reduce_scatter_for_moe", "use_sequence_parallel"):
        if getattr(layer, name, False):
            return f"{name}: each rank then holds the stream of a part of the tokens"
    return None


def _pair(module: str, layer: str, mid: str) -> Recipe:
    return Recipe(f"{_VLLM}{module}.{layer}", "pair", mid)


def _parallel(layer: str, branch: Branch, variant: Callable[[Any], Mapping[str, Any]] = lambda layer: {}) -> Recipe:
    return Recipe(layer, "single", None, PARALLEL, branch, variant=variant)


_PROVEN: tuple[Recipe, ...] = (
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
    Recipe(f"{_VLLM}opt.OPTDecoderLayer", "single", "final_layer_norm", variant=_opt),
    Recipe(f"{_VLLM}granite.GraniteDecoderLayer", "single", "post_attention_layernorm"),
    Recipe(f"{_VLLM}granitemoe.GraniteMoeDecoderLayer", "single", "post_attention_layernorm"),
    Recipe(f"{_VLLM}stablelm.StablelmDecoderLayer", "single", "post_attention_layernorm"),
    Recipe(f"{_VLLM}exaone4.Exaone4DecoderLayer", "single", "mlp"),
    _parallel(f"{_VLLM}falcon.FalconDecoderLayer", Branch("self_attention", partial=True, added=_plus_bias), _falcon),
    _parallel(f"{_VLLM}commandr.CohereDecoderLayer", Branch("self_attn", partial=True)),
    _parallel(f"{_VLLM}gpt_j.GPTJBlock", Branch("attn")),
    _parallel(f"{_HF}gpt_neox.modeling_gpt_neox.GPTNeoXLayer", Branch("attention"), _gpt_neox),
    _parallel(f"{_HF}phi.modeling_phi.PhiDecoderLayer", Branch("self_attn")),
    Recipe(f"{_VLLM}cohere2_moe.Cohere2MoeDecoderLayer", "single", None, PARALLEL),
    Recipe(f"{_VLLM}bloom.BloomBlock", "single", "post_attention_layernorm", accepts=_post_norm_residual),
    Recipe(f"{_VLLM}chatglm.GLMBlock", "single", "post_attention_layernorm", accepts=_post_norm_residual),
    Recipe(f"{_VLLM}olmo_hybrid.OlmoHybridDecoderLayer", "single", "post_attention_layernorm", variant=_olmo_hybrid),
    Recipe(
        f"{_VLLM}deepseek_v2.DeepseekV2DecoderLayer", "pair", "post_attention_layernorm", accepts=_scaled_in_float16
    ),
    Recipe(f"{_VLLM}AXK1.AXK1DecoderLayer", "pair", "post_attention_layernorm", accepts=_scaled_in_float16),
    Recipe(
        f"{_VLLM}openpangu.OpenPanguDecoderLayer",
        "pair",
        "post_attention_layernorm",
        accepts=_scaled_in_float16,
        variant=_openpangu,
    ),
    Recipe(f"{_VLLM}qwen3_next.Qwen3NextDecoderLayer", "pair", "post_attention_layernorm", accepts=_sequence_parallel),
    Recipe(f"{_VLLM}qwen3_5.Qwen3_5DecoderLayer", "pair", "post_attention_layernorm", accepts=_sequence_parallel),
    Recipe(f"{_VLLM}longcat_flash.FlashDecoderLayer", "pair", None, TWO_ATTENTIONS),
    *(Recipe(_VLLM + layer, "pair", mid) for layer, mid in PAIR.items()),
    *(Recipe(_VLLM + layer, "single", mid) for layer, mid in SINGLE.items()),
    *(Recipe(_HF + layer, "single", mid) for layer, mid in TRANSFORMERS.items()),
)
_BASES = {recipe.layer: recipe for recipe in _PROVEN}
RECIPES: tuple[Recipe, ...] = (
    *_PROVEN,
    *(replace(_BASES[_VLLM + base], layer=_VLLM + layer) for layer, base in INHERITED.items()),
)
BY_LAYER: dict[str, Recipe] = {recipe.layer: recipe for recipe in RECIPES}
PROVEN: frozenset[str] = frozenset(BY_LAYER) - {_VLLM + layer for layer in AWAITING}
"""The classes whose recipe is proven, by their qualified names."""


def qualified_class(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def qualified_name(layer: nn.Module) -> str:
    return qualified_class(type(layer))
