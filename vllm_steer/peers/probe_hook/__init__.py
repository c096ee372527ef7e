# SPDX-License-Identifier: Apache-2.0
"""The interface of vllm-probe-hook: engines that return hidden states of chosen layers with every output.

Public: the names in ``__all__``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_steer.params import SamplingParams
    from vllm_steer.peers.probe_hook.asynchronous import AsyncLLM
    from vllm_steer.peers.probe_hook.offline import LLM

__all__ = ["LLM", "AsyncLLM", "SamplingParams"]

_MODULES = {
    "LLM": "vllm_steer.peers.probe_hook.offline",
    "AsyncLLM": "vllm_steer.peers.probe_hook.asynchronous",
    "SamplingParams": "vllm_steer.params",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
