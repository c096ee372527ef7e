# SPDX-License-Identifier: Apache-2.0
"""Taps in the usual wrong places, for tests that must reject them.

Each one replaces a function of ``vllm_steer.models.install``, which ``install_taps`` looks up by name. Most of them
read the right value, so tests of values alone would accept them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Forward = Callable[..., Any]


def late_layer(shape: str, first: str) -> Callable[..., Forward]:
    """Return a maker that taps ``pre_attn`` after the submodule ``first``: its output was computed without the edit.

    ``a|b`` is the first that the layer has.
    """

    def maker(forward: Forward, pre_attn: Any, post_block: Any, residual_at: int = 1) -> Forward:
        named = dict(forward.__self__.named_modules())  # type: ignore[attr-defined]
        module = next(named[name] for name in first.split("|") if name in named)
        in_time = module.forward

        def late(*args: Any, **kwargs: Any) -> Any:
            out = in_time(*args, **kwargs)
            paired = shape == "pair" and len(args) > 1
            pre_attn(out[1] if paired else args[0] if args else kwargs["hidden_states"])
            return out

        def steered(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            if shape == "pair":
                post_block(out[residual_at], out[0])
            else:
                post_block(out[0] if isinstance(out, tuple) else out)
            return out

        module.forward = late
        return steered

    return maker


def late_mid(shape: str) -> Callable[..., Forward]:
    """Return a maker that taps ``post_attn`` after the second norm: the MLP's input was computed without the edit."""

    def maker(forward: Forward, post_attn: Any) -> Forward:
        def steered(x: Any, *args: Any, **kwargs: Any) -> Any:
            out = forward(x, *args, **kwargs)
            post_attn(out[1] if shape == "pair" else x)
            return out

        return steered

    return maker


@dataclass(frozen=True)
class WrongTap:
    """A wrong ``maker`` that replaces a function of ``install`` and spoils the edits at ``point``."""

    model: str
    replaces: str
    maker: Callable[..., Forward]
    point: str

    def __str__(self) -> str:
        return f"{self.model}-late{self.replaces}"


WRONG = (
    WrongTap("llama", "_pair_mid", late_mid("pair"), "post_attn"),
    WrongTap("llama", "_pair_layer", late_layer("pair", "input_layernorm"), "pre_attn"),
    WrongTap("gpt2", "_single_mid", late_mid("single"), "post_attn"),
    WrongTap("gpt2", "_single_layer", late_layer("single", "ln_1"), "pre_attn"),
)


def other_summand(branch: Any, stream: Any) -> Callable[..., None]:
    """Replace ``_with_branch``: tap the residual instead of the branch."""

    def tap(residual: Any, hidden: Any) -> None:
        if branch is not None:
            branch(residual)
        stream(residual, hidden)

    return tap


def after_the_stream(branch: Any, stream: Any) -> Callable[..., None]:
    """Replace ``_with_branch``: ``add`` is right, but reads and ablations of the stream miss the branch's edit."""

    def tap(residual: Any, hidden: Any) -> None:
        stream(residual, hidden)
        if branch is not None:
            branch(hidden)

    return tap


def copied_output(forward: Any, tap: Any) -> Callable[..., Any]:
    """Replace ``_tap_output``: values are right, but edits go to a copy that no module reads."""

    def steered(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        tap((out[0] if isinstance(out, tuple) else out).clone())
        return out

    return steered
