# SPDX-License-Identifier: Apache-2.0
"""Families whose formulas are compared with HF Transformers' layers: settings, and HF's parts under vLLM's names.

``hf_streams.py`` runs the comparison. Attention, MLP and convolutions are HF's; nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch

from tests.conformance import mixes
from tests.conformance.cases import PROMPTS
from tests.conformance.model import LAYERS, TinyModel

TOKENS: Final = PROMPTS[1]


@dataclass(frozen=True)
class Family:
    """HF's model, the module whose input is the stream behind attention, and the formula of its layers."""

    tiny: TinyModel
    mid: str
    adapt: Callable[[Any, Callable[..., Any]], Any]
    formula: Callable[[Any, mixes.At], Callable[..., Any]]
    enter: Callable[[Callable[..., Any], torch.Tensor], Any]
    """Call the formula with the streams, which are the embedding ``[tokens, hidden]`` in the first layer."""
    head: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    flat: bool = False
    """Whether HF passes the streams of a token in one row."""
    pair: bool = False
    """Whether HF's layer returns the indices that sparse attention selected, too."""

    @property
    def streams(self) -> int:
        """Number of streams; 0 for models with an ordinary one."""
        settings = self.tiny.settings
        return int(settings.get("hc_mult", settings.get("hc_count", 0)))


def _hyper(layer: Any, attend: Callable[..., Any]) -> Any:
    """Name the parts of DeepSeek V4's and GLM 5 Next's layers as the formulas do."""
    attn, ffn = layer.attn_hc, layer.ffn_hc
    eps = layer.input_layernorm.variance_epsilon
    return SimpleNamespace(
        rms_norm_eps=eps, hc_eps=attn.hc_eps, hc_mult=attn.hc_mult, n=attn.hc_mult, use_fused_mhc=True,
        hc_post_alpha=2.0, mhc_post_mult_value=2.0, layer_idx=0, num_hidden_layers=LAYERS,
        hc_sinkhorn_iters=attn.hc_sinkhorn_iters, mhc_sinkhorn_iterations=attn.hc_sinkhorn_iters,
        hc_attn_fn=attn.fn, hc_attn_scale=attn.scale, hc_attn_base=attn.base,
        hc_ffn_fn=ffn.fn, hc_ffn_scale=ffn.scale, hc_ffn_base=ffn.base,
        attn_norm=layer.input_layernorm, input_layernorm=layer.input_layernorm,
        ffn_norm=layer.post_attention_layernorm, post_attention_layernorm=layer.post_attention_layernorm,
        attn=lambda positions, x, scaling: attend(x), self_attn=lambda hidden_states, positions: attend(hidden_states),
        mlp=lambda x: layer.mlp(x[None])[0], ffn=lambda x, ids: layer.mlp(x[None], input_ids=ids)[0],
    )  # fmt: skip


def _hunyuan(layer: Any, attend: Callable[..., Any]) -> Any:
    """Name the parts of HY V4's layer, whose ``r`` and ``w`` follow docs/reference/streams.md."""

    def connection(part: Any) -> Any:
        count = part.hc_mult

        def hc_pre(streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = mixes.rms(streams.flatten(-2), None, part.input_norm.eps) @ part.fn.t()
            read = torch.sigmoid(logits[:, :count] * part.scale[0] + part.base[:count]) + part.hc_eps
            write = 2 * torch.sigmoid(logits[:, count:] * part.scale[1] + part.base[count:]) + part.hc_eps
            return mixes.mixed(streams, read), write

        return SimpleNamespace(hc_pre=hc_pre)

    return SimpleNamespace(
        config=SimpleNamespace(hc_mult=layer.attn_hc.hc_mult),
        hc_attn_layer=connection(layer.attn_hc), hc_mlp_layer=connection(layer.ffn_hc),
        input_layernorm=layer.input_layernorm, post_attention_layernorm=layer.post_attention_layernorm,
        self_attn=lambda positions, hidden_states: attend(hidden_states), mlp=lambda x: layer.mlp(x[None])[0],
    )  # fmt: skip


class _Gated:
    """The parts of one of Qwen 4's hyper-connections, mixed by the formulas that replace its kernels."""

    def __init__(self, part: Any) -> None:
        self.part, self.hc_count = part, part.hc_count

    def mix(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the streams, the mix and what ``combine`` takes the weights of the output from."""
        part, count = self.part, self.hc_count
        normed = mixes.grouped_norm(flat, part.hc_norm.weight, part.hc_norm.eps, count)
        gate = part.input_mix_weight_up(mixes.scaled_silu(part.input_mix_weight_down(normed), count))
        injection = None if part.block_inject_weight is None else part.block_inject_weight(normed)
        return flat, mixes.gate_mix(normed, gate, count), injection


def _qwen(layer: Any, attend: Callable[..., Any]) -> Any:
    return SimpleNamespace(
        attn_hyper_connection=_Gated(layer.attn_hyper_connection),
        mlp_hyper_connection=_Gated(layer.mlp_hyper_connection),
        self_attn=lambda hidden_states, positions: attend(hidden_states), mlp=lambda x: layer.mlp(x[None])[0],
    )  # fmt: skip


def _inkling(layer: Any, attend: Callable[..., Any]) -> Any:
    return SimpleNamespace(
        attn_norm=layer.input_layernorm, mlp_norm=layer.post_attention_layernorm,
        attn=lambda positions, x, scaling: attend(x), mlp=lambda x: layer.mlp(x[None])[0],
        attn_sconv=lambda x, positions: layer.attn_sconv(x[None])[0],
        mlp_sconv=lambda x, positions: layer.mlp_sconv(x[None])[0],
    )  # fmt: skip


def _ordinary(layer: Any, attend: Callable[..., Any]) -> Any:
    return SimpleNamespace(layer=layer, attend=attend)


def ordinary(parts: Any, at: mixes.At) -> Callable[..., Any]:
    """Return the layer of Kimi-Linear, which has the ordinary stream of docs/reference/points.md."""
    layer = parts.layer

    def normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
        return mixes.rms(x, norm.weight, norm.variance_epsilon)

    def forward(stream: torch.Tensor) -> Any:
        stream = at("pre_attn", stream)
        stream = at("post_attn", stream + parts.attend(normed(layer.input_layernorm, stream)))
        x = at("mlp_in", normed(layer.post_attention_layernorm, stream))
        return at("post_block", stream + layer.mlp(x[None])[0])

    return forward


def _row(name: str, config: str, layer: str, **settings: Any) -> TinyModel:
    return TinyModel(name, config, settings, "", layer, blocks="layers", auto="AutoModel", attention="eager")


def _weighted(head: Any, streams: torch.Tensor) -> torch.Tensor:
    mix: torch.Tensor = mixes.head(streams, head.hc_fn, head.hc_scale, head.hc_base, head.input_norm.eps, head.eps)
    return mix


_INDEXED: Final[dict[str, Any]] = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 32}
_HYBRID: Final = ["linear_attention", "indexed_attention"] * (LAYERS // 2)
_LINEAR: Final[dict[str, Any]] = {"linear_head_dim": 32, "linear_num_heads": 2}
FAMILIES: Final[dict[str, Family]] = {
    "DeepSeek V4": Family(
        _row("deepseek_v4_hf", "DeepseekV4Config", "DeepseekV4DecoderLayer", hc_mult=4, hc_sinkhorn_iters=5,
             num_attention_heads=4, num_key_value_heads=1, o_groups=2, o_lora_rank=16, sliding_window=8,
             partial_rotary_factor=0.5, **_INDEXED, mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
             layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                          "sliding_attention"]),
        "ffn_hc", _hyper, mixes.deepseek,
        lambda forward, streams: forward(streams, None, torch.tensor([TOKENS])), _weighted,
    ),
    "GLM 5 Next": Family(
        _row("glm5_next_hf", "Glm5NextTextConfig", "Glm5NextDecoderLayer", hc_mult=4, hc_sinkhorn_iters=5,
             num_key_value_heads=4, qk_rope_head_dim=0, index_kpool=2, **_INDEXED, **_LINEAR, layer_types=_HYBRID,
             mlp_layer_types=["dense", "sparse"] * (LAYERS // 2), indexer_types=["full"] * LAYERS),
        "ffn_hc", _hyper, mixes.glm,
        lambda forward, streams: forward(None, *(mixes.done(streams) if streams.dim() == 3 else (streams,))),
        lambda head, streams: streams.mean(-2), pair=True,
    ),
    "HY V4": Family(
        _row("hy_v4_hf", "HYV4Config", "HYV4DecoderLayer", hc_mult=4, num_key_value_heads=4, **_INDEXED,
             indexer_types=["full"] * LAYERS, mlp_layer_types=["dense", "sparse"] * (LAYERS // 2)),
        "ffn_hc", _hunyuan, mixes.hunyuan, lambda forward, streams: forward(None, streams, None), _weighted,
        pair=True,
    ),
    "Qwen 4 (Exp)": Family(
        _row("qwen4_exp_hf", "Qwen4ExpTextConfig", "Qwen4ExpDecoderLayer", hc_count=4, hc_lowrank=12,
             layer_types=_HYBRID, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=32, indexer_budget=4,
             indexer_compress_ratio=2, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=32,
             linear_value_head_dim=32),
        "mlp_hyper_connection", _qwen, mixes.qwen,
        lambda forward, streams: forward(
            (streams if streams.dim() == 3 else mixes.all_same(streams, 4)).flatten(-2), None, None, None
        ),
        lambda head, streams: _Gated(head).mix(streams.flatten(-2))[1], flat=True,
    ),
    "Inkling": Family(
        _row("inkling_hf", "InklingTextConfig", "InklingDecoderLayer", swa_num_attention_heads=4,
             swa_num_key_value_heads=2, swa_head_dim=32, sliding_window_size=8, d_rel=8, rel_extent=16,
             local_layer_ids=[0, 2], mlp_layer_types=["dense", "sparse"] * (LAYERS // 2)),
        "post_attention_layernorm", _inkling, mixes.inkling, lambda forward, stream: forward(None, stream),
    ),
    "Kimi-Linear": Family(
        _row("kimi_linear_hf", "KimiLinearConfig", "KimiDecoderLayer", num_key_value_heads=4, q_lora_rank=None,
             **_LINEAR, layer_types=["linear_attention", "full_attention"] * (LAYERS // 2),
             mlp_layer_types=["dense", "sparse"] * (LAYERS // 2)),
        "post_attention_layernorm", _ordinary, ordinary, lambda forward, stream: forward(stream),
    ),
}  # fmt: skip
