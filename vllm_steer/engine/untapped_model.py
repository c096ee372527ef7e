# SPDX-License-Identifier: Apache-2.0
"""A second compiled copy of the model without taps, for steps without edits and captures (``--steering-plain-code``).

The copy is the default on a GPU. :func:`plain_code_problem` decides by settings alone, so all ranks agree;
:func:`build_untapped_model` finds the models that do not allow it.

A tap that is not launched costs nothing by itself, but the compiler cannot fuse kernels across it. The copy avoids
this. It consists of shells: new objects for the modules that have taps or contain one that does, with the ``forward``
of their class. All other modules, parameters and caches are shared. vLLM compiles the copy as it compiles a stock
model. Before each step, the module tree is switched to one of the two; between steps it has the original modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from vllm_steer.compat.internals import (
    CompilationMode,
    TorchCompileWithNoGuardsWrapper,
    envs,
    set_current_vllm_config,
    set_model_tag,
)
from vllm_steer.config import SteeringConfig
from vllm_steer.models.discovery import Decoder
from vllm_steer.models.install import TAPS

TAG = "plain"
"""vLLM's model tag of the copy: names its folder in the compile cache and appears in the log."""
_FEW_TOKENS = 7
"""Size of a second batch that shows whether the compiler made the size of the first one a constant."""


class UntappedModelUnavailableError(Exception):
    """Raised if no copy can be made of this model; the message is the reason."""


class UntappedModel:
    """The compiled module without taps, and the places in the module tree where it replaces the one with taps.

    Args:
        places: For each reference to the module, the ``_modules`` dictionary of its parent and its name there.
        tapped: The model's own module, with taps.
        untapped: The copy.
    """

    def __init__(self, places: list[tuple[dict[str, Any], str]], tapped: nn.Module, untapped: nn.Module) -> None:
        self._places = places
        self._tapped, self._untapped = tapped, untapped
        self._compiled = False

    def switch(self, *, tapped: bool) -> None:
        """Select the module that the next forward pass runs. Until :meth:`compile`, it is the one with taps."""
        chosen = self._tapped if tapped or not self._compiled else self._untapped
        for modules, name in self._places:
            modules[name] = chosen

    def compile(self, run: Callable[[int], torch.Tensor | None], max_tokens: int) -> None:
        """Compile the copy. Call this after vLLM's profiling run, which compiles the model with taps.

        Args:
            run: Runs a dummy forward pass with the given number of tokens and returns its hidden states, None on a
                pipeline stage that is not the last.
            max_tokens: Size of vLLM's profiling run.

        Raises:
            UntappedModelUnavailableError: The compiled code only serves batches of ``max_tokens``. All steps then run
                the model with taps.
        """
        self._compiled = True
        run(max_tokens)
        few = min(max_tokens, _FEW_TOKENS)
        hidden = run(few)
        # vLLM may pad a batch by a few tokens.
        if hidden is not None and len(hidden) >= max_tokens > few:
            self._compiled = False
            name = type(self._tapped).__name__
            raise UntappedModelUnavailableError(f"{name} without taps only compiles for batches of {max_tokens} tokens")


def modules_with_own_forward(model: nn.Module) -> frozenset[int]:
    """Return the ids of modules whose ``forward`` is an instance attribute, as in vLLM's Transformers backend.

    Call this before taps are installed, since taps set ``forward`` too.
    """
    return frozenset(id(module) for module in model.modules() if "forward" in vars(module))


def plain_code_problem(
    config: SteeringConfig, vllm_config: Any, device: torch.device, *, separate_idle_graphs: bool
) -> str | None:
    """Return why the settings rule out a copy without taps, or None. The answer is the same on all ranks.

    Args:
        config: Steering settings of the engine.
        vllm_config: vLLM's configuration.
        device: Device of the model.
        separate_idle_graphs: Whether the runner can run other code in idle steps than in steered ones.
    """
    if config.plain_code is False:
        return "--no-steering-plain-code (SteeringConfig(plain_code=False)) is set"
    if config.user_hooks:
        return "user_hooks is set, and hooks need the taps of every step"
    if vllm_config.compilation_config.mode == CompilationMode.NONE:
        return "vLLM does not compile the model"
    if not separate_idle_graphs:
        return "this runner captures one set of CUDA graphs"
    if config.graph_sets == 1:
        return "graph_sets is 1, so every step runs all taps"
    if config.plain_code is None and device.type != "cuda":
        return "outside of a GPU, only --steering-plain-code compiles the model a second time"
    if config.plain_code is None and envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is set, and outputs of plain requests would depend on steered ones by rounding"
    return None


def build_untapped_model(
    model: nn.Module, decoder: Decoder, vllm_config: Any, own_forward: frozenset[int]
) -> UntappedModel:
    """Copy a model without its taps.

    Args:
        model: The model, with taps installed.
        decoder: Its decoder layers.
        vllm_config: vLLM's configuration.
        own_forward: Result of :func:`modules_with_own_forward` before the taps were installed.

    Raises:
        UntappedModelUnavailableError: This model cannot be copied.
    """
    root = _compiled_module(model, decoder)
    parents = [module._modules for module in model.modules()]
    places = [(modules, name) for modules in parents for name, child in modules.items() if child is root]
    if not places:
        raise UntappedModelUnavailableError(f"vLLM compiles {type(root).__name__} as a whole")
    affected = _affected_modules(root, decoder)
    caches = {id(module) for module in vllm_config.compilation_config.static_forward_context.values()}
    _check(affected, caches, own_forward)
    untapped: Any = _shell(root, affected)
    untapped.__class__ = _class_with_own_cache_key(type(root))
    with set_current_vllm_config(vllm_config), set_model_tag(TAG):
        TorchCompileWithNoGuardsWrapper.__init__(
            untapped, compile_prefix=untapped._compile_prefix, is_encoder=untapped._is_encoder
        )
    untapped._compile_tag = TAG
    return UntappedModel(places, root, untapped)


def _compiled_module(model: nn.Module, decoder: Decoder) -> Any:
    """Return the module that vLLM compiles and that contains the decoder layers."""
    layers = {id(layer.module) for layer in decoder.layers}
    found = [
        module
        for module in model.modules()
        if isinstance(module, TorchCompileWithNoGuardsWrapper)
        and not getattr(module, "do_not_compile", True)
        and any(id(child) in layers for child in module.modules())
    ]
    if not found:
        raise UntappedModelUnavailableError("vLLM does not compile the decoder layers")
    if len(found) > 1:
        raise UntappedModelUnavailableError(f"vLLM compiles {len(found)} modules with decoder layers")
    return found[0]


def _affected_modules(root: nn.Module, decoder: Decoder) -> dict[int, nn.Module]:
    """Return, by id, the modules of ``root`` that have taps or contain a module that does."""
    tapped = {id(module) for layer in decoder.layers for module in layer.module.modules() if "forward" in vars(module)}
    return {id(module): module for module in root.modules() if any(id(child) in tapped for child in module.modules())}


def _check(affected: dict[int, nn.Module], caches: Collection[int], own_forward: Collection[int]) -> None:
    """Raise UntappedModelUnavailableError for modules that a shell cannot replace.

    A shell would miss a KV cache that vLLM binds to the module later, would lose a ``forward`` that the module had
    before the taps, and could reach a tapped module through an attribute outside of the module tree.
    """
    for module in affected.values():
        name = type(module).__name__
        if id(module) in caches:
            raise UntappedModelUnavailableError(f"{name} has a tap and a KV cache")
        if id(module) in own_forward:
            raise UntappedModelUnavailableError(f"{name} has a forward of its own")
        for attribute, value in vars(module).items():
            if attribute != "_modules" and any(id(each) in affected for each in _referenced(value, module)):
                raise UntappedModelUnavailableError(f"{name}.{attribute} refers to a module with taps")


def _referenced(value: Any, module: nn.Module) -> Iterator[Any]:
    """Yield objects in an attribute of ``module`` that may be modules: items of a container, owners of a method."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value
    elif not isinstance(value, MethodType):
        yield value
    elif value.__self__ is not module:
        yield value.__self__


def _shell(module: nn.Module, affected: dict[int, nn.Module]) -> nn.Module:
    """Return a copy of ``module`` without taps that shares everything but the ``affected`` modules below it."""
    shell = object.__new__(type(module))
    for name, value in vars(module).items():
        # vLLM's custom ops store a bound method of theirs, the one for the current platform.
        own = isinstance(value, MethodType) and value.__self__ is module
        vars(shell)[name] = MethodType(value.__func__, shell) if own else value
    vars(shell).pop("forward", None)
    vars(shell)["_modules"] = {
        name: _shell(child, affected) if child is not None and id(child) in affected else child
        for name, child in module._modules.items()
        if name != TAPS
    }
    return shell


def _class_with_own_cache_key(cls: Any) -> Any:
    """Return a subclass of ``cls`` whose ``forward`` has another name and code object.

    vLLM's caches of compiled code, in memory and on disk, are keyed by these (``compilation/decorators.py``).
    """
    forward = cls.forward
    if not isinstance(forward, FunctionType):
        raise UntappedModelUnavailableError(f"{cls.__name__}.forward is not a plain function")
    code = forward.__code__.replace(co_name=f"{forward.__name__}_{TAG}")
    copy = FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__, copy.__annotations__ = forward.__kwdefaults__, forward.__annotations__
    # Keeps a decorator's __wrapped__, whose signature tells vLLM which inputs have dynamic sizes.
    vars(copy).update(vars(forward))
    copy.__module__, copy.__qualname__ = forward.__module__, f"{TAG}.{forward.__qualname__}"
    return type(cls.__name__, (cls,), {"forward": copy, "__module__": cls.__module__})
