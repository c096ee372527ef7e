# SPDX-License-Identifier: Apache-2.0
"""Install taps on decoder-layer instances, between loading and the first forward pass.

Only instances are changed, so a drafter that shares the class keeps its own ``forward``. torch.compile traces the
wrappers, which are plain functions over tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from vllm_steer.compat.stages import MODEL
from vllm_steer.compat.wraps import install as install_joins
from vllm_steer.models.discovery import Decoder, DecoderLayer, UnsupportedModelError
from vllm_steer.models.recipe import BLOCK_INPUT, BLOCK_OUTPUT, SUMMAND, Recipe
from vllm_steer.models.reduced_norm import TappedNorm
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
_PARTIAL_STAGE = (
    "{layer} cannot be steered with pipeline and tensor parallelism together: a stage hands over one partial sum per "
    "rank. Use one of the two"
)
Forward = Callable[..., Any]
TapCall = Callable[..., None]
"""A function of the stream's summands at one location."""


def install_taps(decoder: Decoder, tables: Tables) -> None:
    """Install the taps of this rank's layers at the engine's points.

    Raises:
        UnsupportedModelError: A layer does not run the ``forward`` of its class, or hands partial sums to another
            pipeline stage.
    """
    for layer in decoder.layers:
        if "forward" in vars(layer.module):
            name = type(layer.module).__name__
            raise UnsupportedModelError(_OFFLOADED.format(number=layer.number, layer=name))
    reduced = any(layer.recipe.reduced_by for layer in decoder.layers)
    if reduced and decoder.tensor_parallel and len(decoder.layers) < decoder.num_layers:
        raise UnsupportedModelError(_PARTIAL_STAGE.format(layer=type(decoder.layers[0].module).__name__))
    every: list[Mapping[PointName, Tap]] = []
    modules: dict[nn.Module, list[Tap]] = {}
    for layer in decoder.layers:
        first = layer.number * len(POINT_NAMES)
        every.append({name: Tap(tables, tables.column[first + POINTS[name].index]) for name in tables.points})
        modules.setdefault(layer.module, []).extend(every[-1].values())
    for module, taps in modules.items():
        # Registered on the layer, so that the taps' buffers are the module's own and move with it.
        module.register_module(TAPS, nn.ModuleList(taps))
    defined_in = {type(layer.module).forward.__module__ for layer in decoder.layers}
    install_joins(join for join in MODEL if join.method.partition(":")[0] in defined_in)
    if reduced:
        _install_at_norms(decoder, every)
    elif decoder.loops:
        _install_in_loop(decoder, every)
    else:
        for layer, own in zip(decoder.layers, every, strict=True):
            _install(layer, own)


def _install_in_loop(decoder: Decoder, taps: Sequence[Mapping[PointName, Tap]]) -> None:
    """Install the taps of layers that run several times per token: each in the pass that its number names."""
    passes: dict[nn.Module, Pass] = {layer.module: Pass() for layer in decoder.layers}
    arguments = {layer.module: _argument(layer.module.forward, layer.recipe.pass_argument) for layer in decoder.layers}
    for layer, own in zip(decoder.layers, taps, strict=True):
        now = passes[layer.module]
        _install(layer, {name: now.only_in(layer.run, tap) for name, tap in own.items()})
    for module, now in passes.items():
        looped: Any = module
        looped.forward = now.follow(looped.forward, arguments[module])


class Pass:
    """The pass in which a layer runs that several passes share."""

    def __init__(self) -> None:
        self._number = -1

    def only_in(self, number: int, tap: TapCall) -> Any:
        """Return a tap that does nothing in other passes."""

        def gated(*summands: Any) -> None:
            if self._number == number:
                tap(*summands)

        return gated

    def follow(self, forward: Forward, number_of: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Forward:
        """Wrap the layer's ``forward`` to read the number of the pass from its arguments."""

        def steered(*args: Any, **kwargs: Any) -> Any:
            self._number = number_of(args, kwargs)
            return forward(*args, **kwargs)

        return steered


def _install(layer: DecoderLayer, taps: Mapping[PointName, Tap]) -> None:
    recipe = layer.recipe
    module: Any = layer.module
    if recipe.install is not None:
        recipe.install(module, taps)
        return
    forward: Forward = module.forward
    pair = recipe.shape == "pair"
    summands = _tap_branch_outputs(layer, taps)
    post_attn = _with_branch(summands.get("attn_out"), taps["post_attn"])
    post_block = _with_branch(summands.get("mlp_out"), taps["post_block"])
    before: TapCall = _in_order(taps["pre_attn"], post_attn) if recipe.post_attn == BLOCK_INPUT else taps["pre_attn"]
    after: TapCall = _in_order(post_attn, post_block) if recipe.post_attn == BLOCK_OUTPUT else post_block
    make = functools.partial(_pair_layer, residual_at=recipe.residual_at) if recipe.residual_at != 1 else _pair_layer
    module.forward = (make if pair else _single_layer)(forward, before, after)
    if recipe.parallel:
        _read_parallel(module, forward, recipe, taps["post_attn"])
    elif recipe.post_attn not in (None, BLOCK_INPUT, BLOCK_OUTPUT):
        reader: Any = module.get_submodule(str(recipe.post_attn))
        reader.forward = (_pair_mid if pair else _single_mid)(reader.forward, post_attn)


def _install_at_norms(decoder: Decoder, taps: Sequence[Mapping[PointName, Tap]]) -> None:
    """Install the taps of layers whose norms reduce the branch: each at the norm that adds the branch to the stream."""
    before: Mapping[PointName, Tap] = {}
    for layer, own in zip(decoder.layers, taps, strict=True):
        block: Any = layer.module
        branch = {} if decoder.tensor_parallel else own
        block.forward = _first_layer(block.forward, own["pre_attn"])
        _tap_norm(block.input_layernorm, before, own["pre_attn"], decoder.tensor_parallel)
        stream = _with_branch(branch.get("attn_out"), own["post_attn"])
        mid = block.get_submodule(str(layer.recipe.post_attn))
        TappedNorm(mid, stream, [own["post_attn"]], own.get("mlp_in"))
        before = own
    if decoder.final_norm is None:
        # Another stage adds this branch, which is complete without tensor parallelism.
        last: Any = decoder.layers[-1].module
        last.forward = _last_layer(last.forward, _with_branch(before.get("mlp_out"), before["post_block"]))
    else:
        _tap_norm(decoder.final_norm, before, None, decoder.tensor_parallel)


def _tap_norm(norm: nn.Module, before: Mapping[PointName, Tap], pre_attn: Tap | None, tensor_parallel: bool) -> None:
    """Install at a norm the taps of the layer before it, which ends there, and ``pre_attn`` of its own."""
    calls: list[TapCall] = []
    if before:
        calls.append(_with_branch(None if tensor_parallel else before.get("mlp_out"), before["post_block"]))
    if pre_attn is not None:
        calls.append(pre_attn)
    taps = [tap for tap in (before.get("post_block"), pre_attn) if tap is not None]
    TappedNorm(norm, functools.reduce(_in_order, calls), taps)


def _first_layer(forward: Forward, pre_attn: Tap) -> Forward:
    """Wrap a layer to tap the model's first stream, which has no branch yet."""
    residual_of = _argument(forward, "residual")
    signature = inspect.signature(forward)

    def steered(*args: Any, **kwargs: Any) -> Any:
        if residual_of(args, kwargs) is not None:
            return forward(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        pre_attn(given["hidden_states"])
        if given.get("attn_in") is not None and pre_attn.is_active():
            # The norm of the stream before the edit, from the kernel that looks up the embedding.
            given["attn_in"] = None
        return forward(**given)

    return steered


def _last_layer(forward: Forward, post_block: TapCall) -> Forward:
    def steered(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        post_block(out[1], out[0])
        return out

    return steered


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


def _pair_layer(forward: Forward, pre_attn: TapCall, post_block: TapCall, residual_at: int = 1) -> Forward:
    hidden_of, residual_of = _argument(forward, "hidden_states"), _argument(forward, "residual")

    def steered(*args: Any, **kwargs: Any) -> Any:
        hidden, residual = hidden_of(args, kwargs), residual_of(args, kwargs)
        if residual is None:
            pre_attn(hidden)
        else:
            pre_attn(residual, hidden)
        out = forward(*args, **kwargs)
        # Some layers return more than the two summands.
        post_block(out[residual_at], out[0])
        return out

    return steered


def _single_layer(forward: Forward, pre_attn: TapCall, post_block: TapCall) -> Forward:
    # Wrappers keep the signature of the layer's own forward.
    names = inspect.signature(forward).parameters
    hidden_of = _argument(forward, "hidden_states" if "hidden_states" in names else "decoder_hidden_states")

    @functools.wraps(forward)
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
