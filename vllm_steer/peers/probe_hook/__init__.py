# SPDX-License-Identifier: Apache-2.0
"""The interface of vllm-probe-hook: engines that return hidden states of chosen layers with every output.

Public: the names in ``__all__``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_steer.lazy_names import lazy_names

if TYPE_CHECKING:
    from vllm_steer.params import SamplingParams
    from vllm_steer.peers.probe_hook.asynchronous import AsyncLLM
    from vllm_steer.peers.probe_hook.offline import LLM

__all__ = ["LLM", "AsyncLLM", "SamplingParams"]

__getattr__ = lazy_names(
    __name__,
    {
        "LLM": "offline",
        "AsyncLLM": "asynchronous",
        "SamplingParams": "options",
    },
)
