# SPDX-License-Identifier: Apache-2.0
"""Helper: rows and logits of a model of HF Transformers with plain and with centred weights.

vLLM's Transformers backend replaces methods of HF's classes, so this runs in a process without vLLM.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tests.conformance.model import build
from tests.conformance.zoo import BY_NAME

TOKENS = [[3, 9, 27, 14, 5]]


class Outputs(NamedTuple):
    """Rows ``[layers, tokens, hidden]`` in front of the final norm, and logits, with plain and with centred weights."""

    plain_rows: torch.Tensor
    centred_rows: torch.Tensor
    plain_logits: torch.Tensor
    centred_logits: torch.Tensor
    centred: int
    layers: int


def plain_and_centred(name: str, embeddings: tuple[str, ...], projections: tuple[str, ...], axis: int) -> Outputs:
    """Return the outputs of a model of the zoo.

    Args:
        name: The model.
        embeddings: Ends of the names of its embeddings.
        projections: Ends of the names of the modules that write to the residual stream.
        axis: Axis of the rows' components in the weights of projections.
    """
    model = build(BY_NAME[name])
    places: list[tuple[torch.Tensor, int]] = []
    for where, weight in model.named_parameters():
        module = where.rpartition(".")[0]
        if module.endswith(projections):
            places.append((weight, axis if weight.ndim > 1 else 0))
        elif module.endswith(embeddings):
            places.append((weight, -1))
    tokens = torch.tensor(TOKENS)
    with torch.inference_mode():
        for weight, along in places:
            weight += 0.1 + 0.2 * torch.randn_like(weight.mean(along, keepdim=True))
        plain = model(tokens, output_hidden_states=True)
        for weight, along in places:
            weight -= weight.mean(along, keepdim=True)
        centred = model(tokens, output_hidden_states=True)
    # The last hidden states are behind the final norm.
    rows = [torch.cat(found.hidden_states[:-1]).clone() for found in (plain, centred)]
    logits = plain.logits.clone(), centred.logits.clone()
    return Outputs(*rows, *logits, len(places), model.config.num_hidden_layers)
