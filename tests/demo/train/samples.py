# SPDX-License-Identifier: Apache-2.0
"""Samples of the trained model for the model card."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

OPENINGS: dict[str, tuple[str, ...]] = {
    "code": (
        "def read_lines(path):",
        "class Connection:\n    def __init__(self, host, port):",
        "import os\nimport sys\n\n\ndef main(",
        "for name, value in items.items():",
        "    if not isinstance(value, str):\n        raise",
        "@property\ndef is_empty(self):\n    return",
    ),
    "prose": (
        "The main purpose of this function is",
        "When a user creates a new account,",
        "In order to install the package, you",
        "This guide describes how",
        "If the connection is lost, the server",
        "There are several ways to",
    ),
}
SAMPLING = {"max_new_tokens": 96, "do_sample": True, "temperature": 0.8, "top_p": 0.95}


@torch.no_grad()
def draw(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, seed: int) -> dict[str, list[dict[str, str]]]:
    """Return one seeded continuation of each opening, at temperature 0.8 and top-p 0.95."""
    torch.manual_seed(seed)
    out: dict[str, list[dict[str, str]]] = {}
    for kind, openings in OPENINGS.items():
        out[kind] = []
        for opening in openings:
            inputs = tokenizer(opening, return_tensors="pt").to(model.device)
            ids = model.generate(**inputs, **SAMPLING)
            new = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            out[kind].append({"opening": opening, "continuation": new})
            print(f"--- {kind}\n{opening}>>>{new}", flush=True)
    return out
