# SPDX-License-Identifier: Apache-2.0
"""``LLM`` with steering: vLLM's own class and three arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.entrypoints.llm import LLM as VllmLLM

from vllm_steer.config import SteeringConfig, engine_kwargs
from vllm_steer.errors import SteeringError
from vllm_steer.frontend import served_by, set_consumers
from vllm_steer.params import has_steering


class LLM(VllmLLM):  # type: ignore[misc]
    """vLLM's ``LLM``; takes the same arguments and these.

    ``enable_steering``
        puts taps on every decoder layer. Without it the engine is stock vLLM, and requests that ask for steering are
        refused.
    ``steering_config``
        a :class:`vllm_steer.SteeringConfig` or a dict of its fields: the sizes of the device tables.
    ``capture_consumers``
        ``{name: options}``: where captured rows may go beside ``memory``, e.g. ``{"filesystem": {"root": "acts"}}``.
    """

    def __init__(
        self,
        model: str,
        *args: Any,
        enable_steering: bool = False,
        steering_config: SteeringConfig | dict[str, Any] | None = None,
        capture_consumers: Mapping[str, Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        if enable_steering:
            for name in ("worker_cls", "scheduler_cls"):
                if kwargs.get(name, "auto") not in ("auto", None):
                    raise SteeringError(name, "steering brings its own; leave it out, or leave enable_steering out")
            kwargs.update(engine_kwargs(steering_config, kwargs.get("additional_config")))
        elif steering_config is not None or capture_consumers is not None:
            name = "steering_config" if steering_config is not None else "capture_consumers"
            raise SteeringError(name, "has no effect without enable_steering=True")
        super().__init__(model, *args, **kwargs)
        if enable_steering:
            # Asked now, so that a model that cannot be steered says so at start and not at the first request.
            set_consumers(self.llm_engine, capture_consumers or {})
            served_by(self.llm_engine)

    def beam_search(self, prompts: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's beam search; refused with steering, since vLLM drops a request's own settings on the way to its
        beams."""
        if has_steering(params):
            raise SteeringError("steering", "beam search does not carry it to the beams; use sampling")
        return super().beam_search(prompts, params, *args, **kwargs)
