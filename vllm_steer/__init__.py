# SPDX-License-Identifier: Apache-2.0
"""Activation steering and capture for stock vLLM.

Importing this package changes nothing in ``vllm``, which is imported on first use. Scripts that import ``LLM`` and
``SamplingParams`` from ``vllm`` call :func:`install` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_steer._version import __version__
from vllm_steer.lazy import imported_on_use

if TYPE_CHECKING:
    from vllm_steer.async_llm import AsyncLLM
    from vllm_steer.capture.consumers import Consumer
    from vllm_steer.capture.files.format import CaptureFileError
    from vllm_steer.capture.files.reader import open_captures
    from vllm_steer.capture.hidden_states import HiddenStates, capture_hidden_states
    from vllm_steer.capture.results import CapturedRequest, CaptureResult
    from vllm_steer.client import AsyncClient, Client, ServerError
    from vllm_steer.client.responses import Completion
    from vllm_steer.config import SteeringConfig, engine_kwargs
    from vllm_steer.errors import IncompatibleError, SteeringError
    from vllm_steer.frontend.controllers import ControlledRequest, Controller
    from vllm_steer.frontend.user_hooks import HookHandle
    from vllm_steer.llm import LLM
    from vllm_steer.params import SamplingParams, add_steering, capture_specs, has_steering
    from vllm_steer.plugin.request_state import CapacityError
    from vllm_steer.plugin.vllm_names import install
    from vllm_steer.registry.registry import SteeringRegistry
    from vllm_steer.request import CaptureSpec, Edit
    from vllm_steer.request.projection import Projection
    from vllm_steer.request.selector import Selector
    from vllm_steer.site_names import site
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
    "add_steering",
    "capture_hidden_states",
    "capture_specs",
    "engine_kwargs",
    "has_steering",
    "install",
    "open_captures",
    "site",
]

_MODULES = {
    "vllm_steer.async_llm": "AsyncLLM",
    "vllm_steer.llm": "LLM",
    "vllm_steer.params": "SamplingParams add_steering capture_specs has_steering",
    "vllm_steer.request": "CaptureSpec Edit",
    "vllm_steer.capture.hidden_states": "HiddenStates capture_hidden_states",
    "vllm_steer.frontend.user_hooks": "HookHandle",
    "vllm_steer.taps.user_hooks": "HookedRows",
    "vllm_steer.client": "AsyncClient Client ServerError",
    "vllm_steer.config": "SteeringConfig engine_kwargs",
    "vllm_steer.errors": "SteeringError IncompatibleError",
    "vllm_steer.capture.files.format": "CaptureFileError",
    "vllm_steer.capture.results": "CaptureResult CapturedRequest",
    "vllm_steer.capture.consumers": "Consumer",
    "vllm_steer.frontend.controllers": "ControlledRequest Controller",
    "vllm_steer.capture.files.reader": "open_captures",
    "vllm_steer.plugin.request_state": "CapacityError",
    "vllm_steer.plugin.vllm_names": "install",
    "vllm_steer.client.responses": "Completion",
    "vllm_steer.request.projection": "Projection",
    "vllm_steer.request.selector": "Selector",
    "vllm_steer.registry.registry": "SteeringRegistry",
    "vllm_steer.site_names": "site",
}

__getattr__ = imported_on_use(__name__, _MODULES)


def __dir__() -> list[str]:
    # Imported on first use, so not among the globals.
    return sorted({*globals(), *__all__})
