# SPDX-License-Identifier: Apache-2.0
"""Checks of requests to an engine without steering, which would ignore the fields of this package.

They run once per request and import nothing until a request has a name that vLLM does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def check_body(request: Any, params: Any) -> Any:
    """Return ``params``, or raise ``RequestRefused`` if the request object of vLLM has steering or capture fields."""
    if request.model_extra or getattr(request, "vllm_xargs", None):
        from vllm_steer.frontend.context import NOT_ENABLED
        from vllm_steer.server.http.apply_fields import refuse_fields

        refuse_fields(request, NOT_ENABLED)
    return params


def check_beam_search(request: Any, _max_tokens: int | None = None) -> None:
    """Raise ``RequestRefused`` if a beam search has steering or capture fields."""
    check_body(request, None)


def add_request(
    original: Callable[..., Any], engine: Any, request_id: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run ``LLMEngine.add_request``, unless a field was assigned to ``params``, where nothing reads it."""
    if getattr(params, "__dict__", None):
        from vllm_steer.params import refuse_assigned_fields

        refuse_assigned_fields(params)
    return original(engine, request_id, prompt, params, *args, **kwargs)


def check_engine_request(input_processor: Any, request: Any) -> None:
    """Raise :class:`SteeringError` for a request whose sampling parameters were made with steering or capture."""
    if getattr(request.sampling_params, "extra_args", None):
        from vllm_steer.frontend import requests

        requests.check_engine_request(input_processor, request)
