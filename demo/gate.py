# SPDX-License-Identifier: Apache-2.0
"""A gate: an edit towards prose that applies only after tokens whose stream looks like code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_steer import Edit, SamplingParams

MAX_TOKENS = 32


@dataclass(frozen=True)
class Gated:
    """Continuations of one prompt, without steering and with a gated edit."""

    prompt: str
    plain: str
    text: str
    open: float
    """Share of the generated tokens at which the gate was open."""


def run_gate(llm: Any, prompts: Sequence[str], vector: np.ndarray, layer: int, strength: float) -> list[Gated]:
    """Generate each prompt without and with a gate.

    The readout is the stream's component along the contrast vector. The bound is its median in the text without
    steering. The gate looks at the token before (`previous`).

    Args:
        llm: An engine with steering.
        prompts: The prompts.
        vector: Contrast vector of the layer, from prose to code.
        layer: The layer that is read and edited.
        strength: Strength of the edit.
    """
    probe = {"probe": vector / np.linalg.norm(vector), "point": "post_block", "layer": layer}

    def generate(**fields: Any) -> list[Any]:
        wanted = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, readouts={"code": probe}, **fields)
        return [output.outputs[0] for output in llm.generate(list(prompts), wanted, use_tqdm=False)]

    plain = generate()
    bound = float(np.median(np.concatenate([each.readouts["code"].values for each in plain])))
    edit = Edit(
        kind="add",
        point="post_block",
        layers=layer,
        vector=vector,
        strength=strength,
        when={"readout": "code", "above": bound, "window": "previous"},
    )
    return [
        Gated(prompt, before.text, after.text, float(after.steering_trace.gates.mean()))
        for prompt, before, after in zip(prompts, plain, generate(steering=[edit]), strict=True)
    ]
