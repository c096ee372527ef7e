# SPDX-License-Identifier: Apache-2.0
"""The interface of vllm-probe-hook: engines that return hidden states of chosen layers with every output.

Public: the names in ``__all__``.
"""

from vllm_steer import SamplingParams
from vllm_steer.peers.probe_hook.engines import LLM, AsyncLLM

__all__ = ["LLM", "AsyncLLM", "SamplingParams"]
