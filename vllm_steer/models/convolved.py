# SPDX-License-Identifier: Apache-2.0
"""Taps of layers whose branches are convolved over tokens before they are added to the stream (Inkling).

A layer leaves the MLP's output to the next one, and ``function(branch, stream, convolution, norm, positions)`` reduces
it over the tensor-parallel ranks, convolves it with the outputs at earlier tokens, adds it and norms the sum. Its
second result is the complete stream, the same on all ranks and a tensor of its own. The taps edit it there, and the
norm of the edited stream replaces the first result. Steps without edits and captures keep the results of vLLM's
kernels.

The function is known by its convolution, which says where the stream is, and by the norm, which says who reads it.
Convolutions cache the outputs of attention and MLP, so edits in front of the last layer's MLP change cache entries too
(``discovery.caches_behind_attention``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_steer.points import PointName
from vllm_steer.taps.tap import Tap

Function = Callable[..., Any]
STREAM = "steering_stream"
"""Attribute of a convolution or a norm: the tap on the sum that ends there or begins there."""
OUTPUT = "steering_output"
"""Attribute of a norm: the tap on its output, if the engine has one."""


def install_convolved(layer: Any, taps: Mapping[PointName, Tap]) -> None:
    """Tap the sums behind attention and MLP, and the stream that enters the first layer."""
    # Not as submodules: the layer owns its taps.
    vars(layer.attn_sconv)[STREAM] = taps["post_attn"]
    vars(layer.mlp_sconv)[STREAM] = taps["post_block"]
    vars(layer.attn_norm)[STREAM] = taps["pre_attn"]
    if "mlp_in" in taps:
        vars(layer.mlp_norm)[OUTPUT] = taps["mlp_in"]
    forward: Function = layer.forward
    pre_attn = taps["pre_attn"]

    def steered(
        positions: Any, hidden_states: Any, pending: Any = None, defer_mlp_add: bool = False, attn_in: Any = None,
        log_scaling: Any = None,
    ) -> Any:  # fmt: skip
        if pending is None:
            pre_attn(hidden_states)
            if pre_attn.is_active():
                # The norm of the stream before the edit, from the kernel that looks up the embedding.
                attn_in = None
        return forward(positions, hidden_states, pending, defer_mlp_add, attn_in, log_scaling)

    layer.forward = steered


def tap_sum(function: Function, delta: Any, hidden: Any, sconv: Any, norm: Any, positions: Any) -> tuple[Any, Any]:
    """Join vLLM's function that convolves, adds and norms; convolutions of a drafter have no taps."""
    out, stream = function(delta, hidden, sconv, norm, positions)
    found = vars(sconv).get(STREAM)
    if found is None:
        return out, stream
    taps: list[Tap] = [found]
    if norm is not None and (reader := vars(norm).get(STREAM)) is not None:
        taps.append(reader)
    out = _edit_and_norm(taps, out, stream, norm)
    if norm is not None and (output := vars(norm).get(OUTPUT)) is not None:
        output(out)
    return out, stream


def _edit_and_norm(taps: list[Tap], out: Any, stream: Any, norm: Any) -> Any:
    """Run the taps on the stream and return its norm, which is ``out`` unless a tap may have edited the stream."""
    for tap in taps:
        tap(stream)
    return norm(stream) if norm is not None and any(tap.is_active() for tap in taps) else out
