# SPDX-License-Identifier: Apache-2.0
"""The interface of vllm-probe-hook: engines that return hidden states of chosen layers with every output.

Public: the names in ``__all__``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_steer.lazy import imported_on_use

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

__getattr__ = imported_on_use(__name__, _MODULES)
