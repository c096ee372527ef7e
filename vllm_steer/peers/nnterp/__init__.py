# SPDX-License-Identifier: Apache-2.0
"""The interface of nnterp: ``StandardizedTransformer``, logit lens and patchscopes on an offline engine.

Public: the names in ``__all__``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_steer.lazy import imported_on_use
from vllm_steer.peers.nnterp.refused import FUNCTIONS

if TYPE_CHECKING:
    from vllm_steer.peers.nnterp.interventions import (
        TargetPrompt,
        logit_lens,
        patchscope_generate,
        patchscope_lens,
        repeat_prompt,
    )
    from vllm_steer.peers.nnterp.model import StandardizedTransformer
    from vllm_steer.peers.nnterp.prompts import (
        Prompt,
        collect_token_activations_batched,
        compute_next_token_probs,
        get_token_activations,
        run_prompts,
    )

_MODULES = {
    "Prompt": ".prompts",
    "StandardizedTransformer": ".model",
    "TargetPrompt": ".interventions",
    "collect_token_activations_batched": ".prompts",
    "compute_next_token_probs": ".prompts",
    "get_token_activations": ".prompts",
    "logit_lens": ".interventions",
    "patchscope_generate": ".interventions",
    "patchscope_lens": ".interventions",
    "repeat_prompt": ".interventions",
    "run_prompts": ".prompts",
}

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

__getattr__ = imported_on_use(__name__, _MODULES, FUNCTIONS)
