# SPDX-License-Identifier: Apache-2.0
"""Formulas of docs/reference/streams.md in plain torch: how the layers of each family mix several streams.

Each layer is written down as one function of complete streams ``[tokens, streams, hidden]``, with a call of ``at`` at
every hook point, instead of vLLM's kernels that complete and mix in one step. Attention, MLP, norms and parameters are
those of vLLM's layer. The kernels, which need a GPU, are replaced by the same formulas (:data:`KERNELS`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from tests.conformance import ngrams

At = Callable[[str, torch.Tensor], torch.Tensor]
"""Given a point and the streams there, return the streams to go on with."""


def rms(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed if weight is None else normed * weight.float()).to(x.dtype)


def gates(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, rms_eps: float, eps: float,
    strength: float, rounds: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return what each stream gives to the mix and takes of the output, and how the streams mix with each other."""
    count = streams.shape[-2]
    logits = rms(streams.flatten(-2).float(), None, rms_eps) @ fn.float().t()
    read, write, between = logits.split([count, count, count * count], dim=-1)
    read = torch.sigmoid(read * scale[0] + base[:count]) + eps
    write = strength * torch.sigmoid(write * scale[1] + base[count : 2 * count])
    between = (between * scale[2] + base[2 * count :]).unflatten(-1, (count, count)).softmax(-1) + eps
    between = between / (between.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        between = between / (between.sum(-1, keepdim=True) + eps)
        between = between / (between.sum(-2, keepdim=True) + eps)
    return read, write.unsqueeze(-1), between


def mixed(streams: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    return (read.unsqueeze(-1) * streams.float()).sum(-2).to(streams.dtype)


def complete(x: torch.Tensor, streams: torch.Tensor, write: torch.Tensor, between: torch.Tensor) -> torch.Tensor:
    """Return ``S_j = sum_i between[i, j] S_i + write_j x``."""
    kept = torch.einsum("tij,tih->tjh", between.float(), streams.float())
    return (kept + write.float() * x.unsqueeze(-2).float()).to(streams.dtype)


def pre(
    streams: Any, fn: Any, scale: Any, base: Any, rms_eps: float, eps: float, sinkhorn_eps: float, strength: float,
    rounds: int, norm_weight: Any = None, norm_eps: float = 0.0, **others: Any,
) -> Any:  # fmt: skip
    """Compute what the kernel of a mix of complete streams computes."""
    read, write, between = gates(streams, fn, scale, base, rms_eps, eps, strength, rounds)
    x = mixed(streams, read)
    return write, between, x if norm_weight is None else rms(x, norm_weight, norm_eps)


def fused(x: Any, streams: Any, write: Any, between: Any, *others: Any, **more: Any) -> Any:
    """Compute what the kernel that completes and mixes computes."""
    streams = complete(x, streams, write, between)
    return streams, *pre(streams, *others, **more)


def pre_op(**given: Any) -> Any:
    """Compute the same with the names of the arguments of vLLM's operator."""
    names = "residual fn hc_scale hc_base rms_eps hc_pre_eps hc_sinkhorn_eps hc_post_mult_value sinkhorn_repeat"
    in_order = [given.pop(name) for name in names.split()]
    return pre(*in_order, **given)


def fused_op(*args: Any, **given: Any) -> Any:
    """Compute the same with the names or the order of the arguments of vLLM's operator."""
    if args:
        return fused(*args, **given)
    names = "x residual post_layer_mix comb_res_mix"
    streams = complete(*[given.pop(name) for name in names.split()])
    return streams, *pre_op(residual=streams, **given)


def broadcast(x: Any, *others: Any, fn_broadcast: Any, **more: Any) -> Any:
    """Compute what the kernel of the first layer computes, whose streams are all the embedding."""
    streams = x.unsqueeze(1).repeat(1, others[0].shape[-1] // x.shape[-1], 1)
    return streams, *pre(streams, *others, **more)


def pre_delayed(
    streams: Any, fn: Any, scale: Any, base: Any, rms_eps: float, eps: float, sinkhorn_eps: float, strength: float,
    rounds: int, pre_mix: Any = None, x: Any = None, norm_weight: Any = None, norm_eps: float = 0.0, **others: Any,
) -> Any:  # fmt: skip
    """Compute what the kernel computes whose mix takes the weights of the sublayer before."""
    count = streams.shape[1]
    if x is not None:  # The parameter is summed over streams, which are all ``x``.
        fn = fn.repeat(1, count) / count
    read, write, between = gates(streams, fn, scale, base, rms_eps, eps, strength, rounds)
    mix = streams[:, 0] if pre_mix is None else mixed(streams, pre_mix)
    return write, between, rms(mix, norm_weight, norm_eps), read


def fused_delayed(x: Any, streams: Any, write: Any, between: Any, *others: Any, capture_aux: Any, **more: Any) -> Any:
    """Compute what the kernel that completes and mixes computes."""
    streams = complete(x, streams, write, between)
    return streams, *pre_delayed(streams, *others, **more), streams.new_empty(0, x.shape[1])


def head(streams: Any, fn: Any, scale: Any, base: Any, rms_eps: float, eps: float) -> Any:
    """Compute the mix in front of the model's final norm."""
    read = torch.sigmoid(rms(streams.flatten(-2).float(), None, rms_eps) @ fn.float().t() * scale + base) + eps
    return mixed(streams, read)


def attn_res(
    prefix: Any, delta: Any, bank: Any, norm_weight: Any, query: Any, output_weight: Any, num_blocks: int,
    block_write_idx: int, eps: float, output_norm_eps: float,
) -> Any:  # fmt: skip
    """Compute a softmax over the stored sums and the running one, which is completed and stored in place."""
    if delta is not None:
        prefix.add_(delta)
    if block_write_idx >= 0:
        bank[:, block_write_idx] = prefix
    sources = torch.cat([bank[:, :num_blocks], prefix.unsqueeze(1)], dim=1).float()
    scores = (rms(sources, norm_weight, eps) @ query.float()).softmax(-1)
    out = (scores.unsqueeze(-1) * sources).sum(1).to(prefix.dtype)
    return out if output_weight is None else rms(out, output_weight, output_norm_eps)


def combine(flat: Any, output: Any, injection: Any, count: int) -> Any:
    """Compute what Qwen 4's kernel computes that adds an output to the streams."""
    weight = torch.ones_like(flat[:, :count]) if injection is None else 2.0 * torch.sigmoid(injection.float() / count)
    return added(flat.unflatten(-1, (count, -1)), output, weight).flatten(-2)


def grouped_norm(flat: Any, weight: Any, eps: float, count: int) -> Any:
    """Compute what Qwen 4's kernel computes that norms each stream."""
    return rms(flat.unflatten(-1, (count, -1)), 1.0 + weight.unflatten(-1, (count, -1)), eps).flatten(-2)


def combine_norm(flat: Any, output: Any, injection: Any, weight: Any, eps: float, count: int) -> Any:
    """Compute both."""
    flat = combine(flat, output, injection, count)
    return flat, grouped_norm(flat, weight, eps, count)


def gate_mix(normed: Any, gate: Any, count: int) -> Any:
    """Compute what Qwen 4's kernel computes that mixes the normed streams."""
    return (gate.sigmoid() * normed).unflatten(-1, (count, -1)).mean(-2)


def scaled_silu(x: Any, count: int) -> Any:
    return torch.nn.functional.silu(x / count)


QWEN: Final[dict[str, Any]] = {
    "grouped_gemma_rmsnorm": grouped_norm,
    "hc_combine": combine,
    "hc_combine_norm": combine_norm,
    "hc_gate_mix": gate_mix,
    "hc_silu": scaled_silu,
}
"""Kernels of Qwen 4 by their names in its module of hyper-connections."""


def all_same(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.unsqueeze(1).repeat(1, count, 1)


def done(streams: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return complete streams in the form of incomplete ones: no output to add and no mixing."""
    tokens, count, hidden = streams.shape
    same = torch.eye(count, device=streams.device).expand(tokens, count, count).contiguous()
    return streams.new_zeros(tokens, hidden), streams, torch.zeros(tokens, count, 1, device=streams.device), same


def deepseek(layer: Any, at: At) -> Callable[..., Any]:
    """Return the layer of DeepSeek V4; on a CPU it passes complete streams on."""
    if hasattr(layer, "mhc_stream"):
        return deepseek_delayed(layer, at)
    settings = layer.rms_norm_eps, layer.hc_eps, layer.hc_post_alpha, layer.hc_sinkhorn_iters
    on_cpu = hasattr(layer, "use_fused_mhc")

    def forward(
        x: Any, positions: Any, ids: Any, post: Any = None, between: Any = None, residual: Any = None, *others: Any,
        **more: Any,
    ) -> Any:  # fmt: skip
        streams = all_same(x, layer.hc_mult) if x.dim() == 2 and residual is None else x
        if residual is not None:
            streams = complete(x, residual, post, between)
        streams = at("pre_attn", streams)
        read, write, between = gates(streams, layer.hc_attn_fn, layer.hc_attn_scale, layer.hc_attn_base, *settings)
        normed = rms(mixed(streams, read), layer.attn_norm.weight, layer.rms_norm_eps)
        streams = at("post_attn", complete(layer.attn(positions, normed, None), streams, write, between))
        read, write, between = gates(streams, layer.hc_ffn_fn, layer.hc_ffn_scale, layer.hc_ffn_base, *settings)
        normed = at("mlp_in", rms(mixed(streams, read), layer.ffn_norm.weight, layer.rms_norm_eps))
        streams = at("post_block", complete(layer.ffn(normed, ids), streams, write, between))
        return (streams, None, None, None) if on_cpu else done(streams)

    return forward


def deepseek_delayed(layer: Any, at: At) -> Callable[..., Any]:
    """Return the layer of DeepSeek V4.1, whose mixes take the weights that the sublayer before computed."""
    settings = layer.rms_norm_eps, layer.hc_eps, layer.hc_post_alpha, layer.hc_sinkhorn_iters

    def forward(
        x: Any, positions: Any, ids: Any, read: Any = None, post: Any = None, between: Any = None,
        residual: Any = None, hashes: Any = None, keep: Any = None, **more: Any,
    ) -> Any:  # fmt: skip
        streams = all_same(x, layer.hc_mult) if x.dim() == 2 and residual is None else x
        if residual is not None:
            streams = complete(x, residual, post, between)
            if layer.engram is not None:
                streams = ngrams.with_memory(layer.engram, streams, hashes, keep)
        streams = at("pre_attn", streams)
        if read is None:
            read = torch.eye(layer.hc_mult, device=streams.device)[0].expand(streams.shape[0], -1)
        normed = rms(mixed(streams, read), layer.attn_norm.weight, layer.rms_norm_eps)
        read, write, between = gates(streams, layer.hc_attn_fn, layer.hc_attn_scale, layer.hc_attn_base, *settings)
        streams = at("post_attn", complete(layer.attn(positions, normed, None), streams, write, between))
        normed = at("mlp_in", rms(mixed(streams, read), layer.ffn_norm.weight, layer.rms_norm_eps))
        read, write, between = gates(streams, layer.hc_ffn_fn, layer.hc_ffn_scale, layer.hc_ffn_base, *settings)
        streams = at("post_block", complete(layer.ffn(normed, ids), streams, write, between))
        return *done(streams), read, None

    return forward


def glm(layer: Any, at: At) -> Callable[..., Any]:
    """Return the layer of GLM 5 Next, whose last one leaves the mean of the streams."""
    eps = layer.rms_norm_eps
    settings = eps, layer.hc_eps, layer.mhc_post_mult_value, layer.mhc_sinkhorn_iterations

    def forward(positions: Any, hidden_states: Any, residual: Any = None, post: Any = None, comb: Any = None) -> Any:
        first = residual is None
        streams = all_same(hidden_states, layer.n) if first else complete(hidden_states, residual, post, comb)
        streams = at("pre_attn", streams)
        read, write, between = gates(streams, layer.hc_attn_fn, layer.hc_attn_scale, layer.hc_attn_base, *settings)
        normed = rms(mixed(streams, read), layer.input_layernorm.weight, eps)
        attended = layer.self_attn(hidden_states=normed, positions=positions)
        streams = at("post_attn", complete(attended, streams, write, between))
        read, write, between = gates(streams, layer.hc_ffn_fn, layer.hc_ffn_scale, layer.hc_ffn_base, *settings)
        normed = at("mlp_in", rms(mixed(streams, read), layer.post_attention_layernorm.weight, eps))
        streams = at("post_block", complete(layer.mlp(normed), streams, write, between))
        if layer.layer_idx == layer.num_hidden_layers - 1:
            return streams.mean(1), None, None, None
        return done(streams)

    return forward


def added(streams: torch.Tensor, out: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
    return (streams.float() + write.float().unsqueeze(-1) * out.float().unsqueeze(-2)).to(streams.dtype)


def hunyuan(layer: Any, at: At) -> Callable[..., Any]:
    """Return the layer of HY V4, whose streams do not mix with each other."""

    def forward(positions: Any, hidden_states: Any, residual: Any) -> Any:
        streams = hidden_states
        if streams.dim() == 2:
            streams = all_same(streams, layer.config.hc_mult)
        streams = at("pre_attn", streams)
        x, write = layer.hc_attn_layer.hc_pre(streams)
        attended = layer.self_attn(positions=positions, hidden_states=layer.input_layernorm(x))
        streams = at("post_attn", added(streams, attended, write))
        x, write = layer.hc_mlp_layer.hc_pre(streams)
        out = layer.mlp(at("mlp_in", layer.post_attention_layernorm(x)))
        return at("post_block", added(streams, out, write)), None

    return forward


def qwen(layer: Any, at: At) -> Callable[..., Any]:
    """Return the layer of Qwen 4, which passes the streams of a token in one row."""
    count = layer.attn_hyper_connection.hc_count

    def point(name: str, flat: torch.Tensor) -> torch.Tensor:
        return at(name, flat.unflatten(-1, (count, -1))).flatten(-2)

    def forward(hidden_states: Any, prev_block_output: Any, prev_injection: Any, positions: Any, **others: Any) -> Any:
        flat, attention, mlp = hidden_states, layer.attn_hyper_connection, layer.mlp_hyper_connection
        if prev_block_output is not None:
            flat = combine(flat, prev_block_output, prev_injection, count)
        flat = point("pre_attn", flat)
        _, x, injection = type(attention).mix(attention, flat)
        attended = layer.self_attn(hidden_states=x, positions=positions)
        flat = point("post_attn", combine(flat, attended, injection, count))
        _, x, injection = type(mlp).mix(mlp, flat)
        flat = point("post_block", combine(flat, layer.mlp(at("mlp_in", x)), injection, count))
        return flat, torch.zeros_like(x), injection

    return forward


def kimi(layer: Any, at: At) -> Callable[..., Any]:
    """Return the layer of Kimi K3: attention over the stored sums, instead of a residual connection."""

    def read(prefix: Any, bank: Any, blocks: int, norm: Any, query: Any, output: Any) -> Any:
        weight, eps = norm.weight, norm.variance_epsilon
        query = query.weight.squeeze(0)
        return attn_res(prefix, None, bank, weight, query, output.weight, blocks, -1, eps, output.variance_epsilon)

    def forward(*, positions: Any, hidden_states: Any, residual: Any, prefix_sum: Any) -> Any:
        total = prefix_sum if hidden_states is None else prefix_sum + hidden_states
        total, blocks = at("pre_attn", total), layer.prev_valid_blocks
        x = read(
            total, residual, blocks, layer.self_attention_res_norm, layer.self_attention_res_proj, layer.input_layernorm
        )
        attended = at("attn_out", layer.self_attn(hidden_states=x, positions=positions))
        if layer.is_block_write_layer:
            residual[:, layer.block_write_idx] = total
            total, blocks = attended, blocks + 1
        else:
            total = total + attended
        total = at("post_attn", total)
        x = read(total, residual, blocks, layer.mlp_res_norm, layer.mlp_res_proj, layer.post_attention_layernorm)
        total = at("post_block", total + at("mlp_out", layer.mlp(at("mlp_in", x))))
        return torch.zeros_like(total), total, residual

    return forward


def inkling(layer: Any, at: At) -> Callable[..., Any]:
    """Return the layer of Inkling, which convolves its branches, without the sum that it leaves to the next one."""

    def forward(
        positions: Any, hidden_states: Any, pending: Any = None, defer_mlp_add: bool = False, attn_in: Any = None,
        log_scaling: Any = None,
    ) -> Any:  # fmt: skip
        def normed(norm: Any) -> torch.Tensor:
            return rms(stream, norm.weight, norm.variance_epsilon)

        stream = at("pre_attn", hidden_states)
        attended = layer.attn(positions, normed(layer.attn_norm), log_scaling)
        stream = at("post_attn", stream + layer.attn_sconv(attended, positions))
        out = layer.mlp(at("mlp_in", normed(layer.mlp_norm)))
        return at("post_block", stream + layer.mlp_sconv(out, positions)), None

    return forward


LAYERS_OF: Final[dict[str, Callable[[Any, At], Callable[..., Any]]]] = {
    "DeepseekV4DecoderLayer": deepseek,
    "Glm5NextDecoderLayer": glm,
    "HYV4DecoderLayer": hunyuan,
    "Qwen4ExpDecoderLayer": qwen,
    "KimiDecoderLayer": kimi,
    "InklingDecoderLayer": inkling,
}
"""Layers by the name of vLLM's class."""
