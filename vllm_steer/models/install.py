# SPDX-License-Identifier: Apache-2.0
"""Putting taps on decoder-layer instances, between loading and the first forward pass.

Only instances are touched: a drafter that shares the class is left alone. torch.compile traces what is installed here,
so the wrappers are plain functions over tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from vllm_steer.models.discovery import Decoder
from vllm_steer.points import POINT_NAMES
from vllm_steer.taps.tables import Tables
from vllm_steer.taps.tap import Tap

PRE_ATTN, POST_ATTN, POST_BLOCK = (POINT_NAMES.index(name) for name in ("pre_attn", "post_attn", "post_block"))


def install_taps(decoder: Decoder, tables: Tables) -> None:
    """Install every tap of this rank's layers."""
    for site in decoder.sites:
        first = site.number * len(POINT_NAMES)
        layer: Any = site.layer
        taps = [Tap(tables, first + point) for point in range(len(POINT_NAMES))]
        wrap = _pair_layer if site.recipe.shape == "pair" else _single_layer
        layer.forward = wrap(layer.forward, taps[PRE_ATTN], taps[POST_BLOCK])
        if site.recipe.mid is not None:
            mid: Any = getattr(layer, site.recipe.mid)
            wrap_mid = _pair_mid if site.recipe.shape == "pair" else _single_mid
            mid.forward = wrap_mid(mid.forward, taps[POST_ATTN])
        # Registered on the layer, so that the taps' buffers are the module's own and move with it.
        layer.steering_taps = nn.ModuleList(taps)


def _argument(forward: Callable[..., Any], name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """A getter for the argument ``name`` of ``forward``: families order their arguments differently."""
    index = list(inspect.signature(forward).parameters).index(name)

    def get(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[index] if index < len(args) else kwargs[name]

    return get


def _pair_layer(forward: Callable[..., Any], pre_attn: Tap, post_block: Tap) -> Callable[..., Any]:
    hidden_of, residual_of = _argument(forward, "hidden_states"), _argument(forward, "residual")

    def steered(*args: Any, **kwargs: Any) -> Any:
        hidden, residual = hidden_of(args, kwargs), residual_of(args, kwargs)
        if residual is None:
            pre_attn(hidden)
        else:
            pre_attn(residual, hidden)
        hidden, residual = forward(*args, **kwargs)
        post_block(residual, hidden)
        return hidden, residual

    return steered


def _single_layer(forward: Callable[..., Any], pre_attn: Tap, post_block: Tap) -> Callable[..., Any]:
    hidden_of = _argument(forward, "hidden_states")

    def steered(*args: Any, **kwargs: Any) -> Any:
        pre_attn(hidden_of(args, kwargs))
        out = forward(*args, **kwargs)
        # Some layers return more beside the stream; what is beside it is not part of it (Cohere's residual).
        post_block(out[0] if isinstance(out, tuple) else out)
        return out

    return steered


def _pair_mid(forward: Callable[..., Any], post_attn: Tap) -> Callable[..., Any]:
    def steered(x: Any, residual: Any) -> Any:
        post_attn(residual, x)
        return forward(x, residual)

    return steered


def _single_mid(forward: Callable[..., Any], post_attn: Tap) -> Callable[..., Any]:
    def steered(x: Any) -> Any:
        post_attn(x)
        return forward(x)

    return steered
