# SPDX-License-Identifier: Apache-2.0
"""Registration of user hooks in the engine of an ``LLM``.

Functions never come from a client: only the process that started the engine can register them, and servers refuse the
setting. Hooks are unknown to the prefix cache, so every request that starts while one is registered has cached blocks
of its own.
"""

from __future__ import annotations

import uuid
from itertools import count
from typing import Any, Self

from vllm_steer.compat.internals import MPClient, envs
from vllm_steer.config import SteeringConfig
from vllm_steer.engine.capabilities import Capabilities
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import NOT_ENABLED, context_of, engine_context
from vllm_steer.points import POINTS, how_to_switch_on
from vllm_steer.request.sites import read_layers_of, read_site
from vllm_steer.taps.user_hooks import Hook

REGISTER_RPC, REMOVE_RPC = "steering_register_hook", "steering_remove_hook"
SETTING = "steering_config.user_hooks"
_OTHER_PROCESS = (
    "functions are not sent to the engine's process; set VLLM_ENABLE_V1_MULTIPROCESSING=0 to run the engine in this one"
)
_HOOKS = "_steering_user_hooks"
_numbers = count(1)


class HookHandle:
    """A registered user hook. As a context manager, it removes the hook at the end of the block.

    Examples:
        >>> with llm.register_hook(fn, "post_block", [3]) as handle:  # doctest: +SKIP
        ...     outputs = llm.generate(prompts, params)
    """

    def __init__(self, engine: Any, number: int) -> None:
        self._engine, self._number = engine, number

    def remove(self) -> None:
        """Remove the hook; a second call has no effect.

        Raises:
            SteeringError: Requests are running.
        """
        hooks: set[int] = getattr(self._engine.output_processor, _HOOKS)
        if self._number in hooks:
            _refuse_running(self._engine)
            self._engine.collective_rpc(REMOVE_RPC, args=(self._number,))
            hooks.discard(self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def register_hook(engine: Any, function: Hook, point: str, layers: Any = None) -> HookHandle:
    """Register a user hook in the engine of an ``LLM``; see `LLM.register_hook`.

    Args:
        engine: vLLM's ``LLMEngine``.
        function: The hook.
        point: A hook point, or a name of another library.
        layers: Layers as in edits; None if the name of the point states one.

    Raises:
        SteeringError: An argument is invalid, the engine was started without user hooks, or requests are running.
    """
    context = engine_context(engine)
    if context is None:
        raise SteeringError("register_hook", NOT_ENABLED)
    capabilities = context.capabilities
    if not capabilities.config.user_hooks:
        raise SteeringError(SETTING, 'is off; start the engine with steering_config={"user_hooks": True}')
    if not callable(function):
        raise SteeringError("fn", f"must be a function of a HookedRows, not {type(function).__name__}")
    name, named = read_site(point, "point")
    chosen = _existing(read_layers_of(named, layers, name), capabilities)
    if POINTS[name].optional and name not in capabilities.config.points:
        raise SteeringError("point", how_to_switch_on(name))
    refused = capabilities.refused.get(name, {})
    for layer in chosen:
        if layer in refused:
            raise SteeringError("point", f"{name} is not supported at layer {layer}: {refused[layer]}")
    check_process(capabilities.config, in_process=not isinstance(engine.engine_core, MPClient))
    _refuse_running(engine)
    number = next(_numbers)
    engine.collective_rpc(REGISTER_RPC, args=(number, function, name, list(chosen)))
    processor = engine.output_processor
    setattr(processor, _HOOKS, {*getattr(processor, _HOOKS, ()), number})
    return HookHandle(engine, number)


def check_process(config: SteeringConfig, *, in_process: bool | None = None) -> None:
    """Raise `SteeringError` if user hooks are on and the engine runs in another process.

    Args:
        config: Settings of the engine.
        in_process: Whether the engine runs in this process; by default, whether vLLM would start it here.
    """
    here = not envs.VLLM_ENABLE_V1_MULTIPROCESSING if in_process is None else in_process
    if config.user_hooks and not here:
        raise SteeringError(SETTING, _OTHER_PROCESS)


def separate_cache(output_processor: Any, request: Any) -> None:
    """Give a sample cached blocks of its own while hooks are registered.

    A hook must see every token of a prompt, and may change its rows as it likes. Request ids can be used again.
    """
    if getattr(output_processor, _HOOKS, None) and context_of(output_processor) is not None:
        request.cache_salt = f"{request.cache_salt or ''} user hooks {uuid.uuid4().hex}"


def _refuse_running(engine: Any) -> None:
    if engine.has_unfinished_requests():
        raise SteeringError("register_hook", "requests are running; wait until they have ended")


def _existing(layers: Any, capabilities: Capabilities) -> tuple[int, ...]:
    if layers == "all":
        return tuple(range(capabilities.num_layers))
    for layer in layers:
        if layer >= capabilities.num_layers:
            last = capabilities.num_layers - 1
            raise SteeringError("layers", f"layer {layer} does not exist; this model has layers 0 to {last}")
    return tuple(layers)
