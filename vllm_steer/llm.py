# SPDX-License-Identifier: Apache-2.0
"""``LLM`` with steering and capture."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_steer.capture.consumers import read_consumers
from vllm_steer.compat.internals import LLM as VllmLLM
from vllm_steer.compat.internals import Metric
from vllm_steer.config import SteeringConfig, engine_kwargs
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import (
    NOT_ENABLED,
    EngineContext,
    RegistryOptions,
    engine_context,
    set_options,
)
from vllm_steer.frontend.live import (
    SET_STRENGTH_RPC,
    LivePosition,
    check_strengths,
    first_position,
    rpc_args,
    samples_of,
)
from vllm_steer.frontend.requests import beam_search_steps
from vllm_steer.frontend.user_hooks import HookHandle, check_process, register_hook
from vllm_steer.metrics.reader import read_metrics
from vllm_steer.params import has_steering
from vllm_steer.registry.registry import SteeringRegistry
from vllm_steer.taps.user_hooks import Hook


@contextmanager
def one_thread(llm: Any, call: str) -> Iterator[None]:
    """Refuse a call while another thread is in one: both would step the engine at once and take each other's outputs.

    vLLM's own ``LLM`` has no such check; its engine does not recover.

    Raises:
        SteeringError: Another thread is using the engine.
    """
    lock = getattr(llm, "_steering_thread", None)
    if lock is not None and not lock.acquire(blocking=False):
        problem = "another thread is using this LLM; call it from one thread at a time, or use AsyncLLM"
        raise SteeringError(call, problem)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _one_thread(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of `LLM` in `one_thread`."""

    @functools.wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with one_thread(self, method.__name__):
            return method(self, *args, **kwargs)

    return alone


class LLM(VllmLLM):  # type: ignore[misc]
    """vLLM's ``LLM`` with steering and capture.

    Args:
        model: As in vLLM.
        *args: Further arguments of vLLM's ``LLM``.
        enable_steering: Enable steering and capture. Without it the engine is stock vLLM, and requests with steering or
            capture are refused.
        steering_config: Sizes of the device tables and other limits, as a `SteeringConfig` or a dict
            of its fields.
        capture_consumers: Options of capture consumers beside ``memory``, by name, for example
            ``{"filesystem": {"root": "acts"}}``.
        steering_registry: Folder or database URL that stores modules and global steering, and that several engines
                can share. By default they are kept in memory.
        steering_modules: Paths of module or vector files to register as modules, by name.
        **kwargs: Further arguments of vLLM's ``LLM``.

    Raises:
        SteeringError: An argument conflicts with steering or needs ``enable_steering=True``.
        IncompatibleError: The version or the settings of vLLM do not support steering.

    Examples:
        >>> from vllm_steer import LLM, SamplingParams  # doctest: +SKIP
        >>> llm = LLM(model="demo/model", enable_steering=True)  # doctest: +SKIP
        >>> params = SamplingParams(max_tokens=8, steering_vectors={"post_block": {1: [0.5] * 256}})  # doctest: +SKIP
        >>> llm.generate("Once upon a time", params)[0].outputs[0].text  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str,
        *args: Any,
        enable_steering: bool = False,
        steering_config: SteeringConfig | dict[str, Any] | None = None,
        capture_consumers: Mapping[str, Mapping[str, Any]] | None = None,
        steering_registry: str | Path | None = None,
        steering_modules: Mapping[str, str | Path] | None = None,
        **kwargs: Any,
    ) -> None:
        if enable_steering:
            for name in ("worker_cls", "scheduler_cls"):
                if kwargs.get(name, "auto") not in ("auto", None):
                    raise SteeringError(name, "steering sets its own; remove it or enable_steering")
            # Before the model is loaded, which takes long.
            consumers = read_consumers(capture_consumers)
            registry = RegistryOptions.of(steering_registry, steering_modules)
            check_process(SteeringConfig.parse(steering_config))
            kwargs.update(engine_kwargs(steering_config, kwargs.get("additional_config")))
        else:
            steering_only = {
                "steering_config": steering_config,
                "capture_consumers": capture_consumers,
                "steering_registry": steering_registry,
                "steering_modules": steering_modules,
            }
            for name, value in steering_only.items():
                if value is not None:
                    raise SteeringError(name, "has no effect without enable_steering=True; add it, or remove this")
        self._steering_thread = threading.RLock()
        super().__init__(model, *args, **kwargs)
        if enable_steering:
            set_options(self.llm_engine, consumers=consumers, registry=registry)
            # Create the context now, so that a wrong consumer or module raises here and not at the first request.
            engine_context(self.llm_engine)

    generate = _one_thread(VllmLLM.generate)
    chat = _one_thread(VllmLLM.chat)
    enqueue = _one_thread(VllmLLM.enqueue)
    enqueue_chat = _one_thread(VllmLLM.enqueue_chat)
    wait_for_completion = _one_thread(VllmLLM.wait_for_completion)

    @property
    def steering(self) -> SteeringRegistry:
        """Registry of this engine: named modules and global steering.

        Raises:
            SteeringError: Steering is not enabled.
        """
        return self._context("steering").registry

    def capabilities(self) -> dict[str, Any]:
        """Return what the engine supports, as ``Client.capabilities`` does: hook points, edits, limits and refusals.

        Raises:
            SteeringError: Steering is not enabled.
        """
        return self._context("capabilities").capabilities.report().model_dump()

    def _context(self, field: str) -> EngineContext:
        context = engine_context(self.llm_engine)
        if context is None:
            raise SteeringError(field, NOT_ENABLED)
        return context

    @_one_thread
    def set_strength(self, request_id: str, **strengths: float) -> LivePosition:
        """Set live strengths of a running request, between two steps of ``llm_engine``.

        Args:
            request_id: The request's id, as given to ``llm_engine.add_request``.
            **strengths: New factors by name; names are those of ``Edit(live=...)``.

        Returns:
            The first position from which the strengths hold for every sample, an integer whose ``positions`` has the
            first position of each sample: its next token, or the end of its prompt if it is within it.

        Raises:
            SteeringError: The request is not running or lacks a live strength, several have the id, a value is not
                finite or too large, or another thread is in a call of this ``LLM``.
        """
        engine = self.llm_engine
        samples = samples_of(engine.output_processor, request_id)
        running, checked = check_strengths(engine, request_id, samples, strengths)
        answers = engine.collective_rpc(SET_STRENGTH_RPC, args=rpc_args(running, checked))
        return first_position(engine, request_id, running, answers)

    def register_hook(self, fn: Hook, point: str, layers: Any = None) -> HookHandle:
        """Run a function on the rows of every request at a hook point, from now on until the hook is removed.

        The engine needs ``steering_config={"user_hooks": True}``. The function gets a `HookedRows`
        for each request, layer and step, and changes its rows or returns new ones. Hooks run ahead of the edits and
        captures of their site. If the function raises, its request ends with ``finish_reason="error"`` and the
        exception in ``stop_reason``; other requests are not affected.

        Args:
            fn: The function.
            point: A hook point such as ``"post_block"``, or a name of another library.
            layers: A layer, a list of layers, or ``"all"``; None if the name of the point states a layer.

        Returns:
            A handle with ``remove()``, also a context manager.

        Raises:
            SteeringError: An argument is invalid, the engine was started without user hooks, or requests are running.
        """
        return register_hook(self.llm_engine, fn, point, layers)

    def get_metrics(self) -> list[Metric]:
        """Return vLLM's metrics and vllm-steer's, whose names begin with ``vllm_steer:``.

        Requires ``disable_log_stats=False``.
        """
        return [*super().get_metrics(), *read_metrics()]

    @_one_thread
    def beam_search(self, prompts: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Run vLLM's beam search, which does not support steering or capture.

        Global steering is applied if all its edits cover all tokens. All steps get the global steering that was set
        when the search began.

        Raises:
            SteeringError: ``params`` use steering or capture, which vLLM would drop; or the engine has other global
                steering or server-wide captures, which would treat generated tokens as prompt.
        """
        if has_steering(params):
            raise SteeringError("steering", "not supported by beam search; use sampling")
        context = engine_context(self.llm_engine)
        if context is None:
            return super().beam_search(prompts, params, *args, **kwargs)
        with beam_search_steps(context):
            return super().beam_search(prompts, params, *args, **kwargs)
