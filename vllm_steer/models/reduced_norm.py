# SPDX-License-Identifier: Apache-2.0
"""Taps at norms that vLLM fuses with the tensor-parallel reduction of the branch in front of them.

The layers of DeepSeek V3.2, GLM 5, MiniMax M3 and Dots 3 leave the outputs of attention and MLP as one partial sum per
rank and pass them to ``function(hidden_states, residual, norm)``, which reduces, adds and norms in one kernel. That
kernel takes the norm's weights, so the norm's ``forward`` does not run, and no rank holds the complete stream before
it. Its second result is the complete stream, the same on all ranks: the taps edit it there, and the norm of the edited
stream replaces the first result. Steps without edits and captures keep the kernel's result. Without the kernel, vLLM
calls the norm's ``forward`` with the reduced branch, and the taps run before it as in other layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from vllm_steer.taps.tap import Tap

Forward = Callable[..., Any]
TapCall = Callable[..., None]


class TappedNorm:
    """The ``forward`` of a norm with taps on the stream that it reads.

    Args:
        norm: The norm; its ``forward`` is replaced.
        stream: Runs the taps on the stream, given the residual and the branch, or the sum of both.
        taps: These taps.
        output: The tap on the norm's output, if the engine has one.
    """

    def __init__(self, norm: nn.Module, stream: TapCall, taps: Sequence[Tap], output: Tap | None = None) -> None:
        self._forward: Forward = norm.forward
        self._stream = stream
        self._taps = tuple(taps)
        self._output = output
        self._ran = False
        norm.forward = self

    def __call__(self, x: Any, residual: Any = None) -> Any:
        """Run the norm as its layer does without the kernel."""
        if residual is None:
            # The first norm of the model; the tap of its layer has run.
            return self._forward(x)
        self._ran = True
        self._stream(residual, x)
        out, stream = self._forward(x, residual)
        if self._output is not None:
            self._output(out)
        return out, stream

    def reduce(self, function: Forward, hidden_states: Any, residual: Any, norm: Any) -> tuple[Any, Any]:
        """Run vLLM's function, and the taps behind its kernel unless it called the norm's ``forward``."""
        self._ran = False
        out, stream = function(hidden_states, residual, norm)
        if self._ran:
            return out, stream
        if any(tap.is_active() for tap in self._taps):
            self._stream(stream)
            out = self._forward(stream)
        if self._output is not None:
            self._output(out)
        return out, stream


def reduce_and_norm(function: Forward, hidden_states: Any, residual: Any, norm: Any) -> tuple[Any, Any]:
    """Join vLLM's fused function: the norms of a drafter have no taps and are left to it."""
    tapped = vars(norm).get("forward")
    if not isinstance(tapped, TappedNorm):
        result: tuple[Any, Any] = function(hidden_states, residual, norm)
        return result
    return tapped.reduce(function, hidden_states, residual, norm)
