# SPDX-License-Identifier: Apache-2.0
"""The interface of TransformerLens: ``run_with_cache`` and ``ActivationCache`` on an offline engine.

Public: the names in ``__all__``.
"""

from vllm_steer.peers.transformer_lens.cache import ActivationCache, get_act_name
from vllm_steer.peers.transformer_lens.driver import SteeringDriver
from vllm_steer.peers.transformer_lens.model import HookedTransformer, TransformerBridge

__all__ = ["ActivationCache", "HookedTransformer", "SteeringDriver", "TransformerBridge", "get_act_name"]
