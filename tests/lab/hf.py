# SPDX-License-Identifier: Apache-2.0
"""Rows of a model in HF Transformers by hooks, as a script without this package has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Hooked:
    """A model of the Llama family whose blocks keep their outputs."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.rows: list[np.ndarray] = []
        for block in self.model.model.layers:
            block.register_forward_hook(self._keep)

    def _keep(self, block: Any, arguments: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self.rows.append(hidden.reshape(-1, hidden.shape[-1]).numpy())

    @torch.no_grad()
    def run(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the output of each block, ``[layers, tokens, hidden]``."""
        self.rows = []
        self.logits = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return np.stack(self.rows)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
