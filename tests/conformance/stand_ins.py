# SPDX-License-Identifier: Apache-2.0
"""Plain attention in place of mixers that only GPUs can run or that need an encoder's output.

The decoder layers, which say where the stream is, are vLLM's own, and so are norms, MLPs, experts, reductions and the
loop over the layers. What a mixer computes does not change where the stream is, and both sides of the identities use
the same one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from tests.conformance import mixes, ngrams
from tests.conformance.model import HIDDEN

_HEADS: Final = 2
_MODELS: Final = "vllm.model_executor.models."
_MIXERS: Final[dict[str, tuple[str, ...]]] = {
    "vllm.models.deepseek_v32.nvidia.model": ("DeepseekV32Attention",),
    "vllm.models.dots3_note.nvidia.model": ("Dots3NoteSlidingAttention", "Dots3NoteFullAttention"),
    "vllm.models.minimax_m3.nvidia.model": ("MiniMaxM3SparseAttention", "MiniMaxM3Attention"),
    "vllm.models.kimi_k3.nvidia.model": ("KimiLinearGatedDeltaNetAttention", "MultiHeadLatentAttention"),
    "vllm.models.deepseek_v4.nvidia.model": ("DeepseekV4FlashMLAAttention",),
    "vllm.models.deepseek_v4.cpu.model": ("DeepseekV4CPUAttention",),
    "vllm.models.glm5next.common.model": ("Glm5NextMLAAttention", "Glm5NextLinearAttention"),
    "vllm.models.qwen4_exp.nvidia.model": ("Qwen3NextAttention",),
    "vllm.models.hy_v4.nvidia.model": ("HYV4MLAAttention",),
    "vllm.models.inkling.nvidia.model": ("InklingAttention",),
    _MODELS + "bailing_moe_v3": ("BailingMoeV3KimiDeltaAttention", "BailingMoeV3MLAAttention"),
}
"""Mixers by the module that uses them."""
_PARTIAL: Final = ("deepseek_v32", "dots3_note", "minimax_m3")
"""Families whose mixers leave one partial sum per rank."""


def replacements(model: str) -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, the name and the replacement of everything that a model needs a GPU for.

    Args:
        model: Module of the model's class, which has been imported.
    """
    from vllm.config import ModelConfig

    owner: Any = sys.modules[model]
    kind = PartialAttention if any(family in model for family in _PARTIAL) else PlainAttention
    kind = AttentionByPosition if any(family in model for family in ("deepseek_v4", "inkling")) else kind
    yield from ((owner, name, kind) for name in _MIXERS.get(model, ()))
    yield from ((owner, name, value) for name, value in _OTHERS.items() if hasattr(owner, name))
    # Latent attention has a cache of its own, which plain attention does not use.
    yield ModelConfig, "use_mla", property(lambda config: False)
    if "minimax_m3" in model:
        yield owner.MiniMAXGemmaRMSNorm, "forward", gemma_norm
    if "kimi_k3" in model:
        yield owner, "ReplicatedLinear", KeptLinear
    if "qwen4_exp" in model:
        yield owner, "Qwen4ExpSparseMoeBlock", PlainMLP
        yield owner.Qwen4ExpForCausalLM, "set_moe_parameters", lambda *args: None
        config = owner.HyperConnectionConfig
        yield owner, "HyperConnectionConfig", lambda **given: config(**{**given, "params_dtype": torch.float32})
        mixer = sys.modules[owner.GatedResidual.__module__]
        yield from ((mixer, name, kernel) for name, kernel in mixes.QWEN.items())
    if "deepseek_v41" in model:
        yield owner, "_select_dsv4_attn_cls", lambda config: AttentionWithWindow
        yield owner.DeepseekV41LLMForCausalLM, "set_moe_parameters", lambda *args: None
        dispatch = sys.modules[owner.mhc_shifted_post_pre.__module__]
        yield dispatch, "mhc_fused_post_pre_delayed_tilelang", mixes.fused_delayed
        yield from ngrams.replacements()
    if "inkling" in model:
        yield owner.InklingRMSNorm, "forward", lambda norm, x: rms_norm(x, norm.weight, norm.variance_epsilon)
    if "cohere_asr" in model:
        yield sys.modules["vllm.transformers_utils.processors.cohere_asr"], "melscale_fbanks", no_filters
    if "kimi_k3" in model or "deepseek_v4" in model:
        yield torch.cuda, "Stream", lambda *args, **kwargs: None


class PlainAttention(nn.Module):
    """Causal attention with the interface of any mixer."""

    reduce_results = True
    positions_first = False

    def __init__(self, *args: Any, prefix: str, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config
        from vllm.distributed import get_tensor_model_parallel_world_size
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear

        super().__init__()
        size = HIDDEN // _HEADS
        heads = _HEADS // get_tensor_model_parallel_world_size()
        config = get_current_vllm_config()
        self.qkv_proj = QKVParallelLinear(HIDDEN, size, _HEADS, _HEADS, bias=False, prefix=f"{prefix}.qkv_proj")
        cache = config.cache_config
        self.attn = Attention(heads, size, size**-0.5, num_kv_heads=heads, cache_config=cache, prefix=f"{prefix}.attn")
        self.o_proj = RowParallelLinear(
            HIDDEN, HIDDEN, bias=False, reduce_results=self.reduce_results, prefix=f"{prefix}.o_proj"
        )

    def forward(self, *args: Any, hidden_states: Any = None, **kwargs: Any) -> Any:
        if self.positions_first:
            args = args[1:2]
        hidden = args[0] if hidden_states is None else hidden_states
        query, key, value = self.qkv_proj(hidden)[0].chunk(3, dim=-1)
        out = self.o_proj(self.attn(query, key, value))[0]
        if len(args) < 3:
            return out
        args[2].copy_(out)
        return None


class AttentionByPosition(PlainAttention):
    """The same, called with positions in front of the hidden states."""

    positions_first = True


class AttentionWithWindow(AttentionByPosition):
    """The same, with the cache of a window, which knows whether prefill leaves tokens out."""

    def __init__(self, *args: Any, prefix: str, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config

        super().__init__(*args, prefix=prefix, **kwargs)
        config = get_current_vllm_config()
        replay = config.cache_config.swa_bounded_replay and config.use_v2_model_runner
        # Engram layers keep the ids of earlier tokens by the slots of this cache.
        self.swa_cache_layer = SlottedCache(self.attn, f"{prefix}.attn", config.cache_config.block_size, replay)


@dataclass(frozen=True)
class SlottedCache:
    """A cache as the layer knows it: its name in the attention's metadata, and its tensor once vLLM has bound one."""

    attn: Any
    prefix: str
    block_size: int
    bounded_replay: bool

    @property
    def kv_cache(self) -> torch.Tensor:
        cache: torch.Tensor = self.attn.kv_cache
        return cache


class ConvolutionState(nn.Module):
    """The owner of the caches of a layer's convolutions, which have their own here."""

    def __init__(self, *args: Any, prefix: str, **kwargs: Any) -> None:
        super().__init__()
        self.prefix, self.kv_cache, self.block_size = prefix, torch.empty(0), 1
        self.stream_ranges = dict.fromkeys(range(4), (0, 0))


class CachedMix(nn.Module):
    """A causal mix over tokens with a cache of its input, in place of a short convolution with one."""

    def __init__(self, dim: int, kernel_size: int, owner: Any, stream_idx: int) -> None:
        from vllm.config import get_current_vllm_config
        from vllm.model_executor.layers.attention import Attention

        super().__init__()
        self.kernel_size, self.stream_idx = kernel_size, stream_idx
        vars(self)["owner"] = owner
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        size, config = dim // _HEADS, get_current_vllm_config().cache_config
        # vLLM reads the layer's number from the name, which may have no second one.
        prefix = f"{owner.prefix}.{'kvam'[stream_idx]}"
        self.mix = Attention(_HEADS, size, size**-0.5, num_kv_heads=_HEADS, cache_config=config, prefix=prefix)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.weight * self.mix(x, x, x)
        return out


class PlainMLP(nn.Module):
    """An MLP in place of experts whose routing has only GPU kernels."""

    def __init__(self, *args: Any, prefix: str = "", **kwargs: Any) -> None:
        from vllm.model_executor.layers.linear import ReplicatedLinear

        super().__init__()
        self.up = ReplicatedLinear(HIDDEN, HIDDEN, bias=False, prefix=f"{prefix}.up")
        self.down = ReplicatedLinear(HIDDEN, HIDDEN, bias=False, prefix=f"{prefix}.down")
        self.is_fused_shared_expert_enabled = False

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(hidden_states)[0].tanh())[0]
        return out

    def finalize_mega_moe_weights(self) -> None:
        return None


class KeptLinear(nn.Linear):
    """A linear layer that keeps its weight; vLLM's CPU build moves weights into a format of its own."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, bias)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


class PlainCross(nn.Module):
    """A function of the token in place of attention to an encoder, which would need an image or a sound."""

    def __init__(self, *args: Any, prefix: str, **kwargs: Any) -> None:
        from vllm.model_executor.layers.linear import ReplicatedLinear

        super().__init__()
        self.first = ReplicatedLinear(HIDDEN, HIDDEN, bias=False, prefix=f"{prefix}.first")
        self.second = ReplicatedLinear(HIDDEN, HIDDEN, bias=False, prefix=f"{prefix}.second")

    def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: Any) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(hidden_states)[0].tanh())[0]
        return out


class NoEncoder(nn.Module):
    """An encoder that no request reaches."""

    d_model = HIDDEN

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def no_filters(n_freqs: int, f_min: float, f_max: float, n_mels: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return filters for the sounds with which vLLM plans its memory; torchaudio would compute real ones."""
    return torch.ones(n_freqs, n_mels)


class PartialAttention(PlainAttention):
    """The same, as one partial sum per rank."""

    reduce_results = False


def embed_and_norm(ids: torch.Tensor, table: torch.Tensor, chain_weight: torch.Tensor, eps: float) -> Any:
    """Compute what the fused kernel computes: the embedding and its norm."""
    found = table[ids]
    wide = found.float()
    normed = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * chain_weight.float()
    return found, normed.to(found.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute what the kernel computes."""
    wide = x.float()
    return (wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)


def add_and_norm(residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    """Compute what the fused kernel computes: the norm of the sum, and the sum."""
    stream = residual + delta
    return rms_norm(stream, weight, eps), stream


def embed_and_chain(ids: torch.Tensor, table: torch.Tensor, weight: Any, eps: float, chain_weight: Any = None) -> Any:
    """Compute what Inkling's kernel computes: the embedding, its norm if it has one, and a norm of that."""
    found = table[ids]
    found = found if weight is None else rms_norm(found, weight, eps)
    return found if chain_weight is None else (found, rms_norm(found, chain_weight, eps))


def gemma_norm(norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """Compute what FlashInfer's kernels compute: the norm of x or, in place, of the sum, which the residual keeps."""
    stream = (x if residual is None else x.add_(residual)).float()
    normed = stream * (stream.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    normed = (normed * (1.0 + norm.weight.float())).to(x.dtype)
    if residual is None:
        return normed
    residual.copy_(stream)
    return x.copy_(normed), residual


_OTHERS: Final[dict[str, Any]] = {
    "WhisperCrossAttention": PlainCross,
    "CohereASRCrossAttention": PlainCross,
    "ConformerEncoder": NoEncoder,
    "RadioWithNeck": NoEncoder,
    "WhisperEncoder": NoEncoder,
    "fused_embed_norm": embed_and_norm,
    "DeepseekV4MoE": PlainMLP,
    "InklingConvState": ConvolutionState,
    "InklingShortConv": CachedMix,
    "InklingDenseMLP": PlainMLP,
    "add_rmsnorm": add_and_norm,
    "embed_rmsnorm": embed_and_chain,
    "initialize_lamport_rs_conv": lambda *args: None,
    "collect_moe_layers": lambda *args, **kwargs: None,
    "mhc_pre_tilelang": mixes.pre,
    "mhc_pre_broadcast_tilelang": mixes.broadcast,
    "mhc_fused_post_pre_tilelang": mixes.fused,
    "mhc_post_tilelang": mixes.complete,
    "mhc_pre_delayed_tilelang": mixes.pre_delayed,
    "hc_collapse_triton": mixes.mixed,
    "hc_head_fused_kernel_tilelang": mixes.head,
    "MHCPreOp": lambda: mixes.pre_op,
    "MHCPostOp": lambda: mixes.complete,
    "MHCFusedPostPreOp": lambda: mixes.fused_op,
    "HCHeadOp": lambda: mixes.head,
    "attn_res": mixes.attn_res,
    "maybe_init_gemm_rs_ar": lambda *args: False,
    "enable_kimi_k3_low_latency_gemm": lambda *args: None,
}
"""Encoders and what attends to them, and functions that use kernels of NVIDIA's GPUs."""
