# SPDX-License-Identifier: Apache-2.0
"""Steering vectors by difference of means: the mean stream over code minus the mean stream over prose."""

from __future__ import annotations

from typing import Any

import numpy as np

from demo.prompts import CODE, PROSE
from vllm_steer import capture_hidden_states


def contrast_vectors(llm: Any) -> np.ndarray:
    """Compute a steering vector for each layer from captured rows.

    All texts have equal weight. Position 0 is excluded: the first token's stream does not depend on the text, and its
    norm is much larger.

    Returns:
        float32 ``[layers, hidden]``: row ``i`` is the vector for ``post_block`` of layer ``i``.
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
