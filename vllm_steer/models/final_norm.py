# SPDX-License-Identifier: Apache-2.0
"""Find the final norm of a loaded model, which readouts of the kind ``lens`` use."""

from __future__ import annotations

from torch import nn

from vllm_steer.compat.internals import PPMissingLayer
from vllm_steer.models.discovery import Decoder

_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm")
"""Final norms beside the list of decoder layers. The self-check compares the norm's output with the model's."""


def find_final_norm(model: nn.Module, decoder: Decoder) -> nn.Module | None:
    """Return the module that norms the stream of the last decoder layer; None if no single module has a known name."""
    if not decoder.layers[-1].recipe.normed:
        return None
    last = decoder.layers[-1].module
    for parent in model.modules():
        if any(isinstance(each, nn.ModuleList) and any(layer is last for layer in each) for each in parent.children()):
            norms = [getattr(parent, name, None) for name in _NAMES]
            # A placeholder marks the norm of another pipeline stage.
            found = [norm for norm in norms if isinstance(norm, nn.Module) and not isinstance(norm, PPMissingLayer)]
            return found[0] if len(found) == 1 else None
    return None
