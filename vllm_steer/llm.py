# SPDX-License-Identifier: Apache-2.0
"""``LLM`` with steering: vLLM's own class, five arguments and the registry of modules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.entrypoints.llm import LLM as VllmLLM
from vllm.v1.metrics.reader import Metric

from vllm_steer.config import SteeringConfig, engine_kwargs
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import NOT_ENABLED, RegistryOptions, engine_context, set_consumers, set_registry
from vllm_steer.metrics.reader import read_metrics
from vllm_steer.params import has_steering
from vllm_steer.registry.registry import SteeringRegistry


class LLM(VllmLLM):  # type: ignore[misc]
    """vLLM's ``LLM``; takes the same arguments and these.

    ``enable_steering``
        puts taps on every decoder layer. Without it the engine is stock vLLM, and requests that ask for steering are
        refused.
    ``steering_config``
        a :class:`vllm_steer.SteeringConfig` or a dict of its fields: the sizes of the device tables.
    ``capture_consumers``
        ``{name: options}``: where captured rows may go beside ``memory``, e.g. ``{"filesystem": {"root": "acts"}}``.
    ``steering_registry``
        a folder in which modules and global steering outlive this object, and that other engines may share; without it
        they are kept in memory.
    ``steering_modules``
        ``{name: path}``: modules that are there from the start, from safetensors files.
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
        ours = {
            "steering_config": steering_config,
            "capture_consumers": capture_consumers,
            "steering_registry": steering_registry,
            "steering_modules": steering_modules,
        }
        if enable_steering:
            for name in ("worker_cls", "scheduler_cls"):
                if kwargs.get(name, "auto") not in ("auto", None):
                    raise SteeringError(name, "steering brings its own; leave it out, or leave enable_steering out")
            kwargs.update(engine_kwargs(steering_config, kwargs.get("additional_config")))
        else:
            for name, value in ours.items():
                if value is not None:
                    raise SteeringError(name, "has no effect without enable_steering=True")
        super().__init__(model, *args, **kwargs)
        if enable_steering:
            # Asked now, so that a model that cannot be steered says so at start and not at the first request.
            set_consumers(self.llm_engine, capture_consumers or {})
            set_registry(self.llm_engine, RegistryOptions.of(steering_registry, steering_modules))
            engine_context(self.llm_engine)

    @property
    def steering(self) -> SteeringRegistry:
        """Named modules and global steering of this engine: ``register``, ``list``, ``get``, ``delete``, ``set``,
        ``clear``, ``status``."""
        served = engine_context(self.llm_engine)
        if served is None:
            raise SteeringError("steering", NOT_ENABLED)
        return served.registry

    def get_metrics(self) -> list[Metric]:
        """vLLM's metrics and ours, which begin with ``vllm_steer:``; for an engine with ``disable_log_stats=False``."""
        return [*super().get_metrics(), *read_metrics()]

    def beam_search(self, prompts: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's beam search; refused with steering, since vLLM drops a request's own settings on the way to its
        beams."""
        if has_steering(params):
            raise SteeringError("steering", "beam search does not carry it to the beams; use sampling")
        return super().beam_search(prompts, params, *args, **kwargs)
