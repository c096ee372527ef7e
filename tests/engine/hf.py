# SPDX-License-Identifier: Apache-2.0
"""The tiny Llama in HF Transformers, with a vector added after the attention of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.engine.answers import logprobs_of, tokens_of
from tests.engine.captures import result
from tests.tiny import HIDDEN, LAYERS


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def forward(model: Any, tokens: Sequence[int], layer: int, vector: np.ndarray | None) -> tuple[list[Any], np.ndarray]:
    """Return the input stream of each block and log-probabilities ``[tokens, vocabulary]``."""
    added = torch.zeros(HIDDEN) if vector is None else torch.from_numpy(vector)
    attention = model.model.layers[layer].self_attn
    handle = attention.register_forward_hook(lambda module, args, output: (output[0] + added, *output[1:]))
    with torch.inference_mode():
        answer = model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
    handle.remove()
    return [states[0] for states in answer.hidden_states], answer.logits[0].log_softmax(-1).numpy()


def agrees(output: Any, model: Any, layer: int, vector: np.ndarray | None) -> None:
    """Return whether a request's ``post_block`` rows and log-probabilities match ``model`` with that edit."""
    streams, logprobs = forward(model, [*output.prompt_token_ids, *tokens_of(output)[:-1]], layer, vector)
    for number in range(LAYERS - 1):
        torch.testing.assert_close(
            result(output).tensor("post_block", number), streams[number + 1], atol=5e-3, rtol=1e-3
        )
    np.testing.assert_allclose(logprobs_of(output), logprobs[len(output.prompt_token_ids) - 1 :], atol=2e-3)
