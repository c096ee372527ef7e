# SPDX-License-Identifier: Apache-2.0
"""The interface of nnterp: ``StandardizedTransformer``, logit lens and patchscopes on an offline engine.

Public: the names in ``__all__``.
"""

from vllm_steer.adapters import imported_on_use
from vllm_steer.peers.nnterp.functions import (
    Prompt,
    TargetPrompt,
    collect_token_activations_batched,
    compute_next_token_probs,
    get_token_activations,
    logit_lens,
    patchscope_generate,
    patchscope_lens,
    repeat_prompt,
    run_prompts,
)
from vllm_steer.peers.nnterp.model import StandardizedTransformer
from vllm_steer.peers.refusals import NAME, REFUSALS

__all__ = [
    "Prompt",
    "StandardizedTransformer",
    "TargetPrompt",
    "collect_token_activations_batched",
    "compute_next_token_probs",
    "get_token_activations",
    "logit_lens",
    "patchscope_generate",
    "patchscope_lens",
    "repeat_prompt",
    "run_prompts",
]

__getattr__ = imported_on_use(__name__, {}, REFUSALS["nnterp"][NAME])
