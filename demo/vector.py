# SPDX-License-Identifier: Apache-2.0
"""A steering vector by difference of means: the mean stream over code less the mean stream over prose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.prompts import CODE, PROSE


def contrast_vectors(model_folder: Path) -> np.ndarray:
    """``[layers, hidden]`` float32: row ``i`` belongs at ``post_block`` of layer ``i``.

    HF's ``hidden_states[i + 1]`` is the stream that leaves block ``i``, except for the last entry, which HF returns
    after the final norm; that row is left out here, so the result has one row fewer than the model has layers.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)

    def mean_stream(texts: tuple[str, ...]) -> torch.Tensor:
        rows = []
        for text in texts:
            tokens = tokenizer(text, return_tensors="pt").input_ids
            with torch.inference_mode():
                states = model(tokens, output_hidden_states=True).hidden_states[1:-1]
            # The first token's stream is a constant of the model, much longer than the others, and says nothing.
            rows.append(torch.stack([state[0, 1:].mean(0) for state in states]))
        return torch.stack(rows).mean(0)

    return (mean_stream(CODE) - mean_stream(PROSE)).numpy()
