# SPDX-License-Identifier: Apache-2.0
"""The model as vLLM has it, beside the one with taps, for steps in which nothing is edited or read.

A tap that is not launched costs nothing, but the compiler does not see through it: it computes what a tap may edit
ahead of it, and what follows afterwards, where it would make one kernel of both. So the module that vLLM compiles
exists twice here. The second one is a shell: another object for each module that was changed or leads to one, with the
class's own ``forward``, and all the rest is the very same, parameters and caches included. vLLM compiles it as it
would compile the model without us, and in each step the one or the other stands where the model calls it; between
steps the model has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import set_current_vllm_config

from vllm_steer.errors import SteeringError
from vllm_steer.log import steering_logger
from vllm_steer.models.discovery import Decoder
from vllm_steer.models.install import TAPS

logger = steering_logger(__name__)

TAG = "plain"
"""Beside vLLM's own tags of what it compiles: a folder in its cache, and a word in its log."""
FEW = 7
"""Tokens of a second step, whose size is not the one that was compiled."""


class NoPlainCode(Exception):
    """Why there is no second one; the message says it."""


class PlainCode:
    """Which of the two runs. Until :meth:`compile`, the one with taps."""

    def __init__(self, places: list[tuple[dict[str, Any], str]], tapped: nn.Module, plain: nn.Module) -> None:
        self._places = places
        self._tapped, self._plain = tapped, plain
        self._compiled = False

    def switch(self, tapped: bool) -> None:
        """Before a forward pass, or the capture of one."""
        chosen = self._tapped if tapped or not self._compiled else self._plain
        for modules, name in self._places:
            modules[name] = chosen

    def compile(self, run: Callable[[int], torch.Tensor | None], most_tokens: int) -> None:
        """``run`` is an idle forward pass of so many tokens, as vLLM's profiling run makes one of ``most_tokens``, and
        gives their hidden states on the last stage. Raises :class:`SteeringError` where that size became a constant."""
        self._compiled = True
        run(most_tokens)
        few = min(most_tokens, FEW)
        hidden = run(few)
        # vLLM may pad a batch by a little.
        if hidden is not None and len(hidden) >= most_tokens > few:
            raise SteeringError(
                "steering_config.plain_code",
                f"{type(self._tapped).__name__} without taps was compiled for steps of {most_tokens} tokens alone; "
                "start without --steering-plain-code",
            )


def own_forwards(model: nn.Module) -> frozenset[int]:
    """Before taps are installed: the ids of modules whose ``forward`` is not their class's, as vLLM's backend for
    Transformers gives them one."""
    return frozenset(id(module) for module in model.modules() if "forward" in vars(module))


def plain_code(model: nn.Module, decoder: Decoder, vllm_config: Any, before: frozenset[int]) -> PlainCode | None:
    """For a model whose taps are installed, and whose :func:`own_forwards` were ``before``; None, and a warning, where
    it cannot be had."""
    try:
        return _plain_code(model, decoder, vllm_config, before)
    except NoPlainCode as reason:
        logger.warning("No plain code, so steps with nothing to do run the model with its taps: %s.", reason)
        return None


def _plain_code(model: nn.Module, decoder: Decoder, vllm_config: Any, before: frozenset[int]) -> PlainCode:
    root = _compiled_module(model, decoder)
    parents = [module._modules for module in model.modules()]
    places = [(modules, name) for modules in parents for name, child in modules.items() if child is root]
    if not places:
        raise NoPlainCode(f"{type(root).__name__} is compiled as a whole")
    changed = _changed(root, decoder)
    caches = {id(module) for module in vllm_config.compilation_config.static_forward_context.values()}
    _check(changed, caches, before)
    plain: Any = _shell(root, changed)
    plain.__class__ = _renamed(type(root))
    with set_current_vllm_config(vllm_config), set_model_tag(TAG):
        TorchCompileWithNoGuardsWrapper.__init__(
            plain, compile_prefix=plain._compile_prefix, is_encoder=plain._is_encoder
        )
    plain._compile_tag = TAG
    return PlainCode(places, root, plain)


def _compiled_module(model: nn.Module, decoder: Decoder) -> Any:
    """The module that vLLM compiles, and that has the layers."""
    layers = {id(layer.module) for layer in decoder.layers}
    found = [
        module
        for module in model.modules()
        if isinstance(module, TorchCompileWithNoGuardsWrapper)
        and not getattr(module, "do_not_compile", True)
        and any(id(each) in layers for each in module.modules())
    ]
    if len(found) != 1:
        raise NoPlainCode("nothing is compiled" if not found else f"{len(found)} modules with layers are compiled")
    return found[0]


def _changed(root: nn.Module, decoder: Decoder) -> dict[int, nn.Module]:
    """Modules of ``root`` that have taps or contain one that has, by id."""
    tapped = {id(module) for layer in decoder.layers for module in layer.module.modules() if "forward" in vars(module)}
    return {id(module): module for module in root.modules() if any(id(each) in tapped for each in module.modules())}


def _check(changed: dict[int, nn.Module], caches: Collection[int], before: Collection[int]) -> None:
    """A shell would not see a cache that vLLM gives the module later, would lack a forward that the module had, or
    would go on to reach a tapped module by a name that is no part of the module tree."""
    for module in changed.values():
        if id(module) in caches:
            raise NoPlainCode(f"{type(module).__name__} keeps a cache and has a tap")
        if id(module) in before:
            raise NoPlainCode(f"{type(module).__name__} has a forward of its own")
        for name, value in vars(module).items():
            if name != "_modules" and any(id(each) in changed for each in _inside(value, module)):
                raise NoPlainCode(f"{type(module).__name__}.{name} is another way to what has a tap")


def _inside(value: Any, module: nn.Module) -> Iterator[Any]:
    """What may be a module in an attribute of ``module``: itself, what a container has, and whose method it is."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value
    elif not isinstance(value, MethodType):
        yield value
    elif value.__self__ is not module:
        yield value.__self__


def _shell(module: nn.Module, changed: dict[int, nn.Module]) -> nn.Module:
    """Another object for ``module`` without what was installed in it; modules that are not ``changed`` are the same."""
    shell = object.__new__(type(module))
    for name, value in vars(module).items():
        # As vLLM's custom ops keep the method of theirs that serves the platform.
        own = isinstance(value, MethodType) and value.__self__ is module
        vars(shell)[name] = MethodType(value.__func__, shell) if own else value
    vars(shell).pop("forward", None)
    vars(shell)["_modules"] = {
        name: _shell(child, changed) if child is not None and id(child) in changed else child
        for name, child in module._modules.items()
        if name != TAPS
    }
    return shell


def _renamed(cls: Any) -> Any:
    """``cls`` with a ``forward`` of another name and code object: by these vLLM keeps what it compiled, in memory and
    on disk (``compilation/decorators.py``)."""
    forward = cls.forward
    if not isinstance(forward, FunctionType):
        raise NoPlainCode(f"{cls.__name__}.forward is no plain function")
    code = forward.__code__.replace(co_name=f"{forward.__name__}_{TAG}")
    copy = FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__, copy.__annotations__ = forward.__kwdefaults__, forward.__annotations__
    # A decorator's __wrapped__ above all: by the signature behind it vLLM finds the inputs whose sizes change.
    vars(copy).update(vars(forward))
    copy.__module__, copy.__qualname__ = forward.__module__, f"{TAG}.{forward.__qualname__}"
    return type(cls.__name__, (cls,), {"forward": copy, "__module__": cls.__module__})
