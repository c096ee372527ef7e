# SPDX-License-Identifier: Apache-2.0
"""Edits of a request, from their published formulas; nothing here comes from the package.

The reference side of every comparison uses only this module, so mistakes in the package's formulas, selectors or wire
form cannot cancel out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

Vector = npt.NDArray[np.float32]
Tokens = str | Sequence[int | tuple[int, int | None]]
Rows = Callable[[torch.Tensor], torch.Tensor]

POINTS = ("pre_attn", "post_attn", "post_block")
KINDS = ("add", "add_normed", "ablate", "clamp")
SUGAR = {"all": "steering_vectors", "prompt": "prefill_steering_vectors", "generated": "decode_steering_vectors"}


@dataclass(frozen=True)
class Formula:
    """One kind of edit as a function of rows ``[n, hidden]`` float32."""

    kind: Literal["add", "add_normed", "ablate", "clamp"]
    vector: Vector
    strength: float = 1.0
    low: float | None = None
    high: float | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.strength * self._change(rows)

    def _change(self, rows: torch.Tensor) -> torch.Tensor:
        vector = torch.from_numpy(self.vector)
        direction: torch.Tensor = vector / vector.norm()
        along = rows @ direction[:, None]
        if self.kind == "add":
            return vector
        if self.kind == "add_normed":
            length: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
            return length * direction
        if self.kind == "ablate":
            return -along * direction
        clipped: torch.Tensor = along.clamp(self.low, self.high)
        return (clipped - along) * direction


@dataclass(frozen=True)
class EditAt:
    """One edit of a request, with the fields of the public ``Edit``."""

    formula: Formula
    point: str
    layers: int | tuple[int, ...] | Literal["all"]
    tokens: Tokens = "all"

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the public ``Edit``."""
        bounds = {"low": self.formula.low, "high": self.formula.high} if self.formula.kind == "clamp" else {}
        return {
            "kind": self.formula.kind,
            "point": self.point,
            "layers": self.layers,
            "vector": self.formula.vector,
            "strength": self.formula.strength,
            "tokens": self.tokens,
            **bounds,
        }

    def sugar(self) -> Mapping[str, Any] | None:
        """Return the edit as a ``*_steering_vectors`` field, or None if only the general form can express it."""
        if self.formula.kind != "add" or not isinstance(self.layers, int) or not isinstance(self.tokens, str):
            return None
        if self.tokens not in SUGAR:
            return None
        entry = {"vector": self.formula.vector, "scale": self.formula.strength}
        return {SUGAR[self.tokens]: {self.point: {self.layers: entry}}}

    def layer_numbers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layer numbers."""
        if self.layers == "all":
            return tuple(range(num_layers))
        return (self.layers,) if isinstance(self.layers, int) else tuple(self.layers)


def positions(tokens: Tokens, prompt_len: int, length: int) -> list[int]:
    """Return the absolute positions that a selector covers in a sequence of ``length`` tokens."""
    if tokens == "all":
        return list(range(length))
    if tokens == "prompt":
        return list(range(prompt_len))
    if tokens == "generated":
        return list(range(prompt_len, length))
    if tokens == "last_prompt":
        return [prompt_len - 1]
    if isinstance(tokens, str):
        raise ValueError(f"unknown selector {tokens!r}")
    covered: set[int] = set()
    for item in tokens:
        first, stop = (item, item + 1) if isinstance(item, int) else item
        begin = first + prompt_len if first < 0 else first
        # The item -1 is the pair (-1, 0) here: its end counts from the end of the prompt, as its start does.
        from_end = stop is not None and (stop < 0 or (stop == 0 and first < 0))
        end = length if stop is None else stop + prompt_len if from_end else stop
        covered.update(range(begin, min(end, length)))
    return sorted(covered)
