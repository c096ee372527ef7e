# SPDX-License-Identifier: Apache-2.0
"""Offline engines of the interfaces that wrap one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import NOT_ENABLED, engine_context
from vllm_steer.frontend.logprobs import RAW, check_logprobs_mode
from vllm_steer.llm import LLM
from vllm_steer.request.scalars import is_integer

if TYPE_CHECKING:
    from vllm_steer.frontend.context import EngineContext


def open_engine(model: Any, arguments: Mapping[str, Any]) -> tuple[LLM, EngineContext]:
    """Return an engine that serves all log-probabilities, and its facts.

    Args:
        model: An engine, or the name or folder of a model to start one with.
        arguments: Arguments of a new engine.

    Raises:
        SteeringError: The engine has no steering or returns other scores, or arguments are given with an engine.
    """
    if isinstance(model, LLM):
        refuse_settings(arguments)
        config = model.llm_engine.vllm_config.model_config
        check_logprobs_mode(config.logprobs_mode, config.logits_processors)
    else:
        check_logprobs_mode(arguments.get("logprobs_mode", RAW), arguments.get("logits_processors"))
        model = LLM(str(model), **{"enable_steering": True, "max_logprobs": -1, **arguments})
    context = engine_context(model.llm_engine)
    if context is None:
        raise SteeringError("model", NOT_ENABLED)
    return model, context


def require_answers(outputs: Iterable[Any]) -> None:
    """Raise RuntimeError if a request ended with an error, for example because a user hook failed."""
    for i, output in enumerate(outputs):
        for sample in output.outputs:
            if sample.finish_reason == "error":
                raise RuntimeError(f"prompts[{i}]: {sample.stop_reason or 'the request ended with an error'}")


def plain_count(value: Any) -> Any:
    """Return numpy's integers as Python's, without which no request reaches the engine, and other values unchanged."""
    return int(value) if is_integer(value) else value


def refuse_settings(arguments: Mapping[str, Any]) -> None:
    """Raise SteeringError if arguments of a new engine are given with one that already runs."""
    for name in arguments:
        raise SteeringError(name, "has no effect on an engine that already runs; omit it")
