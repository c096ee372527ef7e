# SPDX-License-Identifier: Apache-2.0
"""A steering vector by difference of means: the mean stream over code less the mean stream over prose."""

from __future__ import annotations

from typing import Any

import numpy as np

from demo.prompts import CODE, PROSE
from vllm_steer import capture_hidden_states


def contrast_vectors(llm: Any) -> np.ndarray:
    """``[layers, hidden]`` float32: row ``i`` belongs at ``post_block`` of layer ``i``; read with our own capture.

    Each text counts alike, however long it is. Position 0 is left out: the first token's stream is a constant of the
    model, much longer than the others, and says nothing about the text.
    """
    prompts = [*CODE, *PROSE]
    states = capture_hidden_states(llm, prompts, hooks={"post_block": "all"}, positions=[[1, None]], dtype="float32")
    is_code = np.arange(len(prompts)) < len(CODE)
    vectors = []
    for point, layer in states.sites:
        rows, index = states.tensor(point, layer).numpy(), states.prompt_index(point, layer).numpy()
        means = np.stack([rows[index == i].mean(0) for i in range(len(prompts))])
        vectors.append(means[is_code].mean(0) - means[~is_code].mean(0))
    return np.stack(vectors)
