# SPDX-License-Identifier: Apache-2.0
"""The interface of vllm-lens: request keys, ``SteeringVector``, activations on outputs, and the HTTP client.

Public: the names in ``__all__``. :class:`~vllm_steer.peers.vllm_lens.http.VllmLensMiddleware` serves the request keys
over HTTP; the server flag ``--steering-peers vllm-lens`` installs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_steer.adapters import imported_on_use
from vllm_steer.peers.refusals import NAME, REFUSALS

if TYPE_CHECKING:
    from vllm_steer.peers.vllm_lens.client import VLLMLensClient
    from vllm_steer.peers.vllm_lens.keys import SteeringVector
    from vllm_steer.peers.vllm_lens.offline import LLM, SamplingParams, activations_of
    from vllm_steer.peers.vllm_lens.tensors import decode_activations, deserialize_tensor, serialize_tensor

__all__ = [
    "LLM",
    "SamplingParams",
    "SteeringVector",
    "VLLMLensClient",
    "activations_of",
    "decode_activations",
    "deserialize_tensor",
    "serialize_tensor",
]

_MODULES = {
    ".offline": "LLM SamplingParams activations_of",
    ".keys": "SteeringVector",
    ".client": "VLLMLensClient",
    ".tensors": "decode_activations deserialize_tensor serialize_tensor",
}

__getattr__ = imported_on_use(__name__, _MODULES, REFUSALS["vllm-lens"][NAME])
