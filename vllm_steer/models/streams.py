# SPDX-License-Identifier: Apache-2.0
"""Taps of layers that carry several residual streams and mix them.

* **AltUp** (Gemma 3n): one stream is active. Attention and MLP read a prediction of it, and a correction spreads the
  result over all streams. The points are on the active stream.
* **Hyper-connections** (DeepSeek V4, GLM 5 Next, HY V4, Qwen 4): attention and MLP read a mix of all streams, and each
  stream adds its own multiple of their output. The stream of the points is the mean of the streams, and an edit of the
  mean changes each stream by as much.
* **Attention residuals** (Kimi K3): a running sum, of which a bank keeps copies. The points are on the running sum.

Layers of hyper-connections may leave the streams incomplete, as ``(x, streams, post, comb)``, for the kernel of the
next mix to complete. A step with edits or captures completes them first: the taps run on the result, and the kernel
receives ``(0, result, 0, identity)``, from which it computes the same streams. Other steps run the kernel alone.

docs/reference/streams.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm_steer.points import PointName
from vllm_steer.taps.tap import Tap

Taps = Mapping[PointName, Tap]
Function = Callable[..., Any]
TAPPED = "steering_mix"
"""Attribute of a mix's parameter: the function that taps the streams in front of it."""


def altup(layer: Any, taps: Taps) -> None:
    """Tap the active prediction, what the norm before the MLP reads, and the active stream that the layer leaves."""
    active: int = layer.altup_active_idx
    _after(layer.altup, "predict", lambda predictions: taps["pre_attn"](predictions[active]))
    norm = layer.pre_feedforward_layernorm
    _before(norm, "forward", taps["post_attn"])
    if "mlp_in" in taps:
        _after(norm, "forward", taps["mlp_in"])
    _after(layer, "forward", lambda streams: taps["post_block"](streams[active]))


def separate(layer: Any, taps: Taps) -> None:
    """Tap layers whose two mixes are modules that read complete streams."""
    _before(layer.hc_attn_layer, "pre", taps["pre_attn"].mean)
    _before(layer.hc_mlp_layer, "pre", taps["post_attn"].mean)
    _after(layer, "forward", lambda out: taps["post_block"].mean(out[0]))
    _tap_mlp(layer.mlp, taps)


def unfused(layer: Any, taps: Taps) -> None:
    """Tap layers whose two mixes are calls of one method that reads complete streams."""
    mix: Function = layer.hc_pre

    def tapped(streams: Any, fn: Any, *others: Any) -> Any:
        (taps["post_attn"] if fn is layer.hc_ffn_fn else taps["pre_attn"]).mean(streams)
        return mix(streams, fn, *others)

    layer.hc_pre = tapped
    _after(layer, "forward", lambda out: taps["post_block"].mean(out[0]))
    _tap_mlp(layer.ffn, taps)


def fused_methods(layer: Any, taps: Taps) -> None:
    """Tap layers whose methods complete and mix in one kernel; the last layer completes the streams by itself."""
    complete: Function = layer.hc_post
    mix: Function = layer.hc_fused_post_pre

    def tapped(x: Any, residual: Any, post: Any, comb: Any, fn: Any, *others: Any, **more: Any) -> Any:
        tap = taps["post_attn"] if fn is layer.hc_ffn_fn else taps["pre_attn"]
        return mix(*_completed(complete, tap, x, residual, post, comb), fn, *others, **more)

    layer.hc_fused_post_pre = tapped
    _before(layer, "hc_pre", taps["pre_attn"].mean)
    _after(layer, "hc_post", taps["post_block"].mean)
    _leave_complete(layer, complete, taps["post_block"])
    _tap_mlp(layer.mlp, taps)


def fused_functions(layer: Any, taps: Taps) -> None:
    """Tap layers that call functions of their module, which know a mix by its parameter (:func:`tap_streams`)."""
    complete: Function = type(layer).forward.__globals__["mhc_post_tilelang"]
    for parameter, point in ((layer.hc_attn_fn, taps["pre_attn"]), (layer.hc_ffn_fn, taps["post_attn"])):
        setattr(parameter, TAPPED, (complete, point))
    if getattr(layer, "engram", None) is not None:
        # Adds a memory to the complete streams, which a function reads that is not joined.
        _after(layer.engram, "forward", taps["pre_attn"].mean)
    _leave_complete(layer, complete, taps["post_block"])
    forward: Function = layer.forward

    def steered(x: Any, *others: Any, **more: Any) -> Any:
        if _residual(others, more, layer) is None:
            # The model's first layer reads the embedding, which is every stream; another stage's, complete streams.
            (taps["pre_attn"] if x.dim() == 2 else taps["pre_attn"].mean)(x)
        return forward(x, *others, **more)

    layer.forward = steered
    _tap_mlp(layer.ffn, taps)


def gated(layer: Any, taps: Taps) -> None:
    """Tap layers whose two mixes are modules that may complete the streams first; another layer adds the MLP's output.

    The streams of a token are one row there, ``[tokens, streams * hidden]``.
    """
    for mixer, tap in (
        (layer.attn_hyper_connection, taps["pre_attn"]),
        (layer.mlp_hyper_connection, taps["post_attn"]),
    ):
        _tap_gated(mixer, tap)
    _leave_combined(layer, taps["post_block"])
    _tap_mlp(layer.mlp, taps)


def attention_residuals(layer: Any, taps: Taps) -> None:
    """Tap the running sum, which travels as two summands; layers that store it begin a new one with attention."""
    norm: Function = layer._post_attn_norm
    forward: Function = layer.forward
    attn_out, mlp_out = taps.get("attn_out"), taps.get("mlp_out")

    def after_attention(hidden_states: Any, residual: Any, prefix_sum: Any) -> Any:
        if attn_out is not None:
            attn_out(hidden_states)
        if layer.is_block_write_layer:
            taps["post_attn"](hidden_states)
        else:
            taps["post_attn"](prefix_sum, hidden_states)
        return norm(hidden_states, residual, prefix_sum)

    def steered(*, hidden_states: Any, prefix_sum: Any, **others: Any) -> Any:
        taps["pre_attn"](prefix_sum, hidden_states)
        out = forward(hidden_states=hidden_states, prefix_sum=prefix_sum, **others)
        if mlp_out is not None:
            mlp_out(out[0])
        taps["post_block"](out[1], out[0])
        return out

    layer._post_attn_norm, layer.forward = after_attention, steered
    _tap_mlp(layer.mlp, taps)


def tap_streams(
    function: Function, x: Any, residual: Any, post: Any, comb: Any, fn: Any, *others: Any, **more: Any
) -> Any:
    """Join vLLM's function that completes the streams and mixes them; mixes of a drafter have no taps."""
    if (tapped := getattr(fn, TAPPED, None)) is not None:
        complete, tap = tapped
        x, residual, post, comb = _completed(complete, tap, x, residual, post, comb)
    return function(x, residual, post, comb, fn, *others, **more)


def _completed(complete: Function, tap: Tap, x: Any, residual: Any, post: Any, comb: Any) -> tuple[Any, Any, Any, Any]:
    """Return the parts of the streams, complete and tapped if the step runs the site."""
    if not tap.is_active():
        return x, residual, post, comb
    streams = complete(x, residual, post, comb)
    tap.mean(streams)
    same = torch.eye(comb.shape[-1], dtype=comb.dtype, device=comb.device).expand_as(comb).contiguous()
    return torch.zeros_like(x), streams, torch.zeros_like(post), same


def _leave_complete(layer: Any, complete: Function, tap: Tap) -> None:
    """Tap the streams that a layer leaves incomplete as its first four results."""
    forward: Function = layer.forward

    def steered(*args: Any, **kwargs: Any) -> Any:
        x, residual, post, comb, *others = forward(*args, **kwargs)
        if residual is None:
            return x, residual, post, comb, *others
        return *_completed(complete, tap, x, residual, post, comb), *others

    layer.forward = steered


def _tap_gated(mixer: Any, tap: Tap) -> None:
    complete: Function = mixer.combine
    combine_and_mix: Function = mixer.combine_and_mix
    mix: Function = mixer.mix
    count: int = mixer.hc_count

    def tapped_mix(streams: Any) -> Any:
        tap.mean(streams.unflatten(-1, (count, -1)))
        return mix(streams)

    def tapped(streams: Any, output: Any, injection: Any) -> Any:
        if not tap.is_active():
            return combine_and_mix(streams, output, injection)
        return tapped_mix(complete(streams, output, injection))

    mixer.mix, mixer.combine_and_mix = tapped_mix, tapped


def _leave_combined(layer: Any, tap: Tap) -> None:
    """Tap the streams that a layer leaves as ``(streams, output, injection)``."""
    forward: Function = layer.forward
    mixer = layer.mlp_hyper_connection
    complete: Function = mixer.combine
    count: int = mixer.hc_count

    def steered(*args: Any, **kwargs: Any) -> Any:
        streams, output, injection = forward(*args, **kwargs)
        if not tap.is_active():
            return streams, output, injection
        streams = complete(streams, output, injection)
        tap.mean(streams.unflatten(-1, (count, -1)))
        return streams, torch.zeros_like(output), injection

    layer.forward = steered


def _residual(args: tuple[Any, ...], kwargs: dict[str, Any], layer: Any) -> Any:
    """Return the argument ``residual`` of a layer, None if it is not given."""
    code = type(layer).forward.__code__
    at = code.co_varnames.index("residual") - 2
    return args[at] if at < len(args) else kwargs.get("residual")


def _tap_mlp(mlp: Any, taps: Taps) -> None:
    if "mlp_in" in taps:
        _before(mlp, "forward", taps["mlp_in"])


def _before(owner: Any, name: str, tap: Callable[[Any], None]) -> None:
    """Tap the first argument of a method."""
    method: Function = getattr(owner, name)

    def tapped(first: Any, *others: Any, **more: Any) -> Any:
        tap(first)
        return method(first, *others, **more)

    setattr(owner, name, tapped)


def _after(owner: Any, name: str, tap: Callable[[Any], None]) -> None:
    """Tap the result of a method."""
    method: Function = getattr(owner, name)

    def tapped(*args: Any, **kwargs: Any) -> Any:
        out = method(*args, **kwargs)
        tap(out)
        return out

    setattr(owner, name, tapped)
