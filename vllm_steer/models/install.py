# SPDX-License-Identifier: Apache-2.0
"""Putting taps on decoder-layer instances, between loading and the first forward pass.

Only instances are touched: a drafter that shares the class is left alone. torch.compile traces what is installed here,
so the wrappers are plain functions over tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from vllm_steer.models.branches import SUMMAND, not_served, place_of
from vllm_steer.models.discovery import Decoder, Site, UnsupportedModelError
from vllm_steer.models.layers import ENTRY, EXIT
from vllm_steer.models.recipes import Branch
from vllm_steer.points import OPTIONAL_POINTS, POINT_NAMES, POINTS, PointName
from vllm_steer.taps.tables import Tables
from vllm_steer.taps.tap import Tap

TAPS = "steering_taps"
"""The name by which a layer has its taps."""
OFFLOADED = (
    "layer {number}, {layer}, cannot be steered: it has a forward of its own and not that of its class. vLLM's weight "
    "offloading gives it one (--offload-group-size; --cpu-offload-gb with VLLM_WEIGHT_OFFLOADING_DISABLE_UVA=1), and "
    "puts it back after each call, in the place of the taps. Leave that or --enable-steering out"
)
Stand = Callable[..., None]
"""What is called with the summands of the stream at one place."""


def install_taps(decoder: Decoder, tables: Tables) -> None:
    """Install every tap of this rank's layers, at the points that the engine has. Raises
    :class:`~vllm_steer.models.discovery.UnsupportedModelError` for layers that do not run their class's ``forward``."""
    for site in decoder.sites:
        if "forward" in vars(site.layer):
            raise UnsupportedModelError(OFFLOADED.format(number=site.number, layer=type(site.layer).__name__))
    for site in decoder.sites:
        first = site.number * len(POINT_NAMES)
        layer: Any = site.layer
        taps = {name: Tap(tables, tables.column[first + POINTS[name].index]) for name in tables.points}
        summands = _tap_outputs(site, taps)
        forward = layer.forward
        wrap = _pair_layer if site.recipe.shape == "pair" else _single_layer
        mid_name = site.recipe.mid
        post_attn = _with_branch(summands.get("attn_out"), taps["post_attn"])
        post_block = _with_branch(summands.get("mlp_out"), taps["post_block"])
        before: Stand = _both(taps["pre_attn"], post_attn) if mid_name == ENTRY else taps["pre_attn"]
        after: Stand = _both(post_attn, post_block) if mid_name == EXIT else post_block
        layer.forward = wrap(forward, before, after)
        if site.recipe.branch is not None:
            _read_branch(layer, forward, site.recipe.branch, taps["post_attn"])
        if mid_name not in (None, ENTRY, EXIT):
            mid: Any = layer.get_submodule(mid_name)
            wrap_mid = _pair_mid if site.recipe.shape == "pair" else _single_mid
            mid.forward = wrap_mid(mid.forward, post_attn)
        # Registered on the layer, so that the taps' buffers are the module's own and move with it.
        layer.register_module(TAPS, nn.ModuleList(taps.values()))


def _tap_outputs(site: Site, taps: Mapping[PointName, Tap]) -> dict[PointName, Tap]:
    """Put those taps of branches that stand behind a submodule; the others, which stand at a summand, are returned."""
    summands: dict[PointName, Tap] = {}
    for point in OPTIONAL_POINTS:
        if point not in taps or not_served(point, site.recipe, site.layer) is not None:
            continue
        place = place_of(point, site.recipe, site.layer)
        if place == SUMMAND:
            summands[point] = taps[point]
        else:
            module: Any = site.layer.get_submodule(place)
            module.forward = _output(module.forward, taps[point])
    return summands


def _output(forward: Callable[..., Any], tap: Tap) -> Callable[..., Any]:
    """What a submodule gives, ahead of everything that computes with it."""

    def steered(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        tap(out[0] if isinstance(out, tuple) else out)
        return out

    return steered


def _with_branch(branch: Tap | None, stream: Tap) -> Stand:
    """The point on the stream, behind the one on the summand that the layer hands on beside the residual, if any."""
    if branch is None:
        return stream

    def stand(residual: Any, hidden: Any) -> None:
        branch(hidden)
        stream(residual, hidden)

    return stand


def _argument(forward: Callable[..., Any], name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """A getter for the argument ``name`` of ``forward``: families order their arguments differently."""
    index = list(inspect.signature(forward).parameters).index(name)

    def get(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[index] if index < len(args) else kwargs[name]

    return get


def _both(first: Stand, second: Stand) -> Stand:
    """Two points at one place, in their order."""

    def stand(*summands: Any) -> None:
        first(*summands)
        second(*summands)

    return stand


def _pair_layer(forward: Callable[..., Any], pre_attn: Stand, post_block: Stand) -> Callable[..., Any]:
    hidden_of, residual_of = _argument(forward, "hidden_states"), _argument(forward, "residual")

    def steered(*args: Any, **kwargs: Any) -> Any:
        hidden, residual = hidden_of(args, kwargs), residual_of(args, kwargs)
        if residual is None:
            pre_attn(hidden)
        else:
            pre_attn(residual, hidden)
        out = forward(*args, **kwargs)
        # Some layers return more beside the two summands.
        post_block(out[1], out[0])
        return out

    return steered


def _single_layer(forward: Callable[..., Any], pre_attn: Stand, post_block: Stand) -> Callable[..., Any]:
    hidden_of = _argument(forward, "hidden_states")

    def steered(*args: Any, **kwargs: Any) -> Any:
        pre_attn(hidden_of(args, kwargs))
        out = forward(*args, **kwargs)
        # Some layers return more beside the stream; what is beside it is not part of it (Cohere's residual).
        post_block(out[0] if isinstance(out, tuple) else out)
        return out

    return steered


def _pair_mid(forward: Callable[..., Any], post_attn: Stand) -> Callable[..., Any]:
    def steered(x: Any, residual: Any) -> Any:
        post_attn(residual, x)
        return forward(x, residual)

    return steered


def _single_mid(forward: Callable[..., Any], post_attn: Stand) -> Callable[..., Any]:
    def steered(x: Any, *args: Any, **kwargs: Any) -> Any:
        post_attn(x)
        return forward(x, *args, **kwargs)

    return steered


def _read_branch(layer: Any, forward: Callable[..., Any], branch: Branch, post_attn: Tap) -> None:
    """Read a parallel block's input plus its attention branch, which the block itself never adds up alone.

    The input is a tensor that the tap at ``pre_attn`` edits in place before attention runs. The op's schema says that
    this tap writes to it too; it never does, since edits are refused here.
    """
    attention: Any = getattr(layer, branch.module)
    tapped, attend = layer.forward, attention.forward
    # Of the layer's own forward: what wraps it takes anything.
    hidden_of = _argument(forward, "hidden_states")
    entered: list[Any] = []

    @functools.wraps(forward)
    def entering(*args: Any, **kwargs: Any) -> Any:
        entered.append(hidden_of(args, kwargs))
        out = tapped(*args, **kwargs)
        entered.clear()
        return out

    def read(*args: Any, **kwargs: Any) -> Any:
        out = attend(*args, **kwargs)
        post_attn(entered[-1], branch.added(out))
        return out

    layer.forward, attention.forward = entering, read
