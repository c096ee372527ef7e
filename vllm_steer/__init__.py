# SPDX-License-Identifier: Apache-2.0
"""Activation steering and capture for stock vLLM.

Importing this package changes nothing in ``vllm``, which is imported on first use. Scripts that import ``LLM`` and
``SamplingParams`` from ``vllm`` call :func:`install` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_steer._version import __version__
from vllm_steer.lazy_names import lazy_names

if TYPE_CHECKING:
    from vllm_steer.async_llm import AsyncLLM
    from vllm_steer.capture.consumers import Consumer
    from vllm_steer.capture.files.format import CaptureFileError
    from vllm_steer.capture.files.reader import open_captures
    from vllm_steer.capture.hidden_states import HiddenStates, capture_hidden_states
    from vllm_steer.capture.results import CapturedRequest, CaptureResult
    from vllm_steer.client import AsyncClient, Client, ServerError
    from vllm_steer.client.responses import Completion
    from vllm_steer.compat.names import install
    from vllm_steer.compat.request_state import CapacityError
    from vllm_steer.config import SteeringConfig, engine_kwargs
    from vllm_steer.errors import IncompatibleError, SteeringError
    from vllm_steer.frontend.controllers import ControlledRequest, Controller
    from vllm_steer.frontend.user_hooks import HookHandle
    from vllm_steer.llm import LLM
    from vllm_steer.params import SamplingParams
    from vllm_steer.registry.registry import SteeringRegistry
    from vllm_steer.site_names import site
    from vllm_steer.spec import CaptureSpec, Edit
    from vllm_steer.spec.projection import Projection
    from vllm_steer.spec.selector import Selector
    from vllm_steer.taps.user_hooks import HookedRows

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncLLM",
    "CapacityError",
    "CaptureFileError",
    "CaptureResult",
    "CaptureSpec",
    "CapturedRequest",
    "Client",
    "Completion",
    "Consumer",
    "ControlledRequest",
    "Controller",
    "Edit",
    "HiddenStates",
    "HookHandle",
    "HookedRows",
    "IncompatibleError",
    "Projection",
    "SamplingParams",
    "Selector",
    "ServerError",
    "SteeringConfig",
    "SteeringError",
    "SteeringRegistry",
    "__version__",
    "capture_hidden_states",
    "engine_kwargs",
    "install",
    "open_captures",
    "site",
]

__getattr__ = lazy_names(
    __name__,
    {
        "AsyncLLM": "async_llm",
        "LLM": "llm",
        "SamplingParams": "params",
        "CaptureSpec": "spec",
        "Edit": "spec",
        "HiddenStates": "capture.hidden_states",
        "HookHandle": "frontend.user_hooks",
        "HookedRows": "taps.user_hooks",
        "capture_hidden_states": "capture.hidden_states",
        "AsyncClient": "client",
        "Client": "client",
        "ServerError": "client",
        "SteeringConfig": "config",
        "engine_kwargs": "config",
        "SteeringError": "errors",
        "CaptureFileError": "capture.files.format",
        "CaptureResult": "capture.results",
        "CapturedRequest": "capture.results",
        "Consumer": "capture.consumers",
        "ControlledRequest": "frontend.controllers",
        "Controller": "frontend.controllers",
        "open_captures": "capture.files.reader",
        "CapacityError": "compat.request_state",
        "install": "compat.names",
        "Completion": "client.responses",
        "IncompatibleError": "errors",
        "Projection": "spec.projection",
        "Selector": "spec.selector",
        "SteeringRegistry": "registry.registry",
        "site": "site_names",
    },
)


def __dir__() -> list[str]:
    # Imported on first use, so not among the globals.
    return sorted({*globals(), *__all__})
