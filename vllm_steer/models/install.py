# SPDX-License-Identifier: Apache-2.0
"""Install taps on decoder-layer instances, between loading and the first forward pass.

Only instances are changed, so a drafter that shares the class keeps its own ``forward``. torch.compile traces the
wrappers, which are plain functions over tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from vllm_steer.models.discovery import Decoder, DecoderLayer, UnsupportedModelError
from vllm_steer.models.recipe import BLOCK_INPUT, BLOCK_OUTPUT, SUMMAND, Recipe
from vllm_steer.points import OPTIONAL_POINTS, POINT_NAMES, POINTS, PointName
from vllm_steer.taps.tables import Tables
from vllm_steer.taps.tap import Tap

TAPS = "steering_taps"
"""Attribute of a layer that holds its taps."""
_OFFLOADED = (
    "layer {number}, {layer}, cannot be steered: vLLM's weight offloading replaces its forward (--offload-group-size; "
    "--cpu-offload-gb with VLLM_WEIGHT_OFFLOADING_DISABLE_UVA=1) and would remove the taps. Disable weight offloading "
    "or --enable-steering"
)
Forward = Callable[..., Any]
TapCall = Callable[..., None]
"""A function of the stream's summands at one location."""


def install_taps(decoder: Decoder, tables: Tables) -> None:
    """Install the taps of this rank's layers at the engine's points.

    Raises:
        UnsupportedModelError: A layer does not run the ``forward`` of its class.
    """
    for layer in decoder.layers:
        if "forward" in vars(layer.module):
            name = type(layer.module).__name__
            raise UnsupportedModelError(_OFFLOADED.format(number=layer.number, layer=name))
    for layer in decoder.layers:
        first = layer.number * len(POINT_NAMES)
        taps = {name: Tap(tables, tables.column[first + POINTS[name].index]) for name in tables.points}
        _install(layer, taps)
        # Registered on the layer, so that the taps' buffers are the module's own and move with it.
        layer.module.register_module(TAPS, nn.ModuleList(taps.values()))


def _install(layer: DecoderLayer, taps: Mapping[PointName, Tap]) -> None:
    recipe = layer.recipe
    module: Any = layer.module
    forward: Forward = module.forward
    pair = recipe.shape == "pair"
    summands = _tap_branch_outputs(layer, taps)
    post_attn = _with_branch(summands.get("attn_out"), taps["post_attn"])
    post_block = _with_branch(summands.get("mlp_out"), taps["post_block"])
    before: TapCall = _in_order(taps["pre_attn"], post_attn) if recipe.post_attn == BLOCK_INPUT else taps["pre_attn"]
    after: TapCall = _in_order(post_attn, post_block) if recipe.post_attn == BLOCK_OUTPUT else post_block
    module.forward = (_pair_layer if pair else _single_layer)(forward, before, after)
    if recipe.parallel:
        _read_parallel(module, forward, recipe, taps["post_attn"])
    elif recipe.post_attn not in (None, BLOCK_INPUT, BLOCK_OUTPUT):
        reader: Any = module.get_submodule(str(recipe.post_attn))
        reader.forward = (_pair_mid if pair else _single_mid)(reader.forward, post_attn)


def _tap_branch_outputs(layer: DecoderLayer, taps: Mapping[PointName, Tap]) -> dict[PointName, Tap]:
    """Install the taps that follow a submodule; return those at a summand of the stream."""
    summands: dict[PointName, Tap] = {}
    for point in OPTIONAL_POINTS:
        if point not in taps or layer.recipe.refusal(point) is not None:
            continue
        location = _location(layer.recipe, point, layer.module)
        if location == SUMMAND:
            summands[point] = taps[point]
        else:
            module: Any = layer.module.get_submodule(location)
            module.forward = _tap_output(module.forward, taps[point])
    return summands


_location = Recipe.location


def _tap_output(forward: Forward, tap: Tap) -> Forward:
    """Wrap a submodule to tap its (first) output before any other module reads it."""

    def steered(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        tap(out[0] if isinstance(out, tuple) else out)
        return out

    return steered


def _with_branch(branch: Tap | None, stream: Tap) -> TapCall:
    """Return a function that taps the branch, which is the summand beside the residual, and then the stream."""
    if branch is None:
        return stream

    def tap(residual: Any, hidden: Any) -> None:
        branch(hidden)
        stream(residual, hidden)

    return tap


def _in_order(first: TapCall, second: TapCall) -> TapCall:
    def tap(*summands: Any) -> None:
        first(*summands)
        second(*summands)

    return tap


def _argument(forward: Forward, name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Return a getter for the argument ``name`` of ``forward``: families order their arguments differently."""
    index = list(inspect.signature(forward).parameters).index(name)

    def get(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[index] if index < len(args) else kwargs[name]

    return get


def _pair_layer(forward: Forward, pre_attn: TapCall, post_block: TapCall) -> Forward:
    hidden_of, residual_of = _argument(forward, "hidden_states"), _argument(forward, "residual")

    def steered(*args: Any, **kwargs: Any) -> Any:
        hidden, residual = hidden_of(args, kwargs), residual_of(args, kwargs)
        if residual is None:
            pre_attn(hidden)
        else:
            pre_attn(residual, hidden)
        out = forward(*args, **kwargs)
        # Some layers return more than the two summands.
        post_block(out[1], out[0])
        return out

    return steered


def _single_layer(forward: Forward, pre_attn: TapCall, post_block: TapCall) -> Forward:
    hidden_of = _argument(forward, "hidden_states")

    def steered(*args: Any, **kwargs: Any) -> Any:
        pre_attn(hidden_of(args, kwargs))
        out = forward(*args, **kwargs)
        # Some layers return more than the stream (Cohere's residual), which is not part of it.
        post_block(out[0] if isinstance(out, tuple) else out)
        return out

    return steered


def _pair_mid(forward: Forward, post_attn: TapCall) -> Forward:
    def steered(x: Any, residual: Any) -> Any:
        post_attn(residual, x)
        return forward(x, residual)

    return steered


def _single_mid(forward: Forward, post_attn: TapCall) -> Forward:
    def steered(x: Any, *args: Any, **kwargs: Any) -> Any:
        post_attn(x)
        return forward(x, *args, **kwargs)

    return steered


def _read_parallel(layer: Any, forward: Forward, recipe: Recipe, post_attn: Tap) -> None:
    """Wrap a parallel block to read its input plus its attention branch, which the block never sums by itself.

    The tap at ``pre_attn`` has edited that input in place before attention runs. The op's schema declares a write to
    the sum, but edits are refused here, so none happens.
    """
    attention: Any = getattr(layer, recipe.attn_out)
    tapped, attend = layer.forward, attention.forward
    # Read from the layer's own forward, since the signature of its wrapper is generic.
    hidden_of = _argument(forward, "hidden_states")
    inputs: list[Any] = []

    @functools.wraps(forward)
    def remember_input(*args: Any, **kwargs: Any) -> Any:
        inputs.append(hidden_of(args, kwargs))
        out = tapped(*args, **kwargs)
        inputs.clear()
        return out

    def read(*args: Any, **kwargs: Any) -> Any:
        out = attend(*args, **kwargs)
        post_attn(inputs[-1], recipe.attn_added(out))
        return out

    layer.forward, attention.forward = remember_input, read
