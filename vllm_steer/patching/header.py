# SPDX-License-Identifier: Apache-2.0
"""Description of a sweep: what its file and the answers of a server carry beside the numbers."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

from vllm_steer.patching.axes import Span, label
from vllm_steer.points import PointName

Direction = Literal["denoising", "noising", "ablation"]
VERSION = 1


class PairInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of one pair, as the sweep used them."""

    base: tuple[int, ...]
    """Tokens of the run that is patched."""
    source: tuple[int, ...]
    """Tokens of the run whose activations are used; empty if they do not come from a prompt of the pair."""
    answer: tuple[int, ...]
    foil: tuple[int, ...]
    columns: tuple[Span, ...]
    """Positions of the grid's columns in the patched run."""
    labels: tuple[str, ...]
    """Text of the grid's columns."""
    skipped: tuple[int, ...]
    """Positions of the patched run that have no counterpart in the source and are in no column."""


class SweepInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a sweep. Two sweeps with equal descriptions have the same cells."""

    version: int = VERSION
    model: str
    direction: Direction
    corruption: str
    """How the clean run was corrupted: another prompt, noise or an ablation, with its settings."""
    metric: str
    """Default metric of the grids."""
    points: tuple[PointName, ...]
    layers: tuple[Span, ...]
    """Layers that each row of a grid patches."""
    row_layers: tuple[Span, ...]
    """Layers after which the rows are named; without windows, equal to ``layers``."""
    pairs: tuple[PairInfo, ...]
    draws: int
    """Runs per pair, over which grids are averaged."""
    strength: float
    kl_tokens: int
    """Tokens of the clean distribution that the divergence distinguishes; 0 if it was not measured."""
    subspace: str = ""
    """Digest of the directions and of the random directions, if only a subspace was patched."""
    random_control: bool = False
    """Whether each cell was run a second time in a random subspace."""
    sources: str = ""
    """Digest of the prompts of ``reference``, the positions of ``subject`` and the alignment."""

    @property
    def has_foil(self) -> bool:
        """Whether the pairs have a foil."""
        return bool(self.pairs[0].foil)

    @property
    def row_names(self) -> tuple[str, ...]:
        """Names of the grids' rows: the layer and, of a window around it, the layers that are patched together."""
        return tuple(
            label(row) if row == span else f"{label(row)} ({label(span)})"
            for row, span in zip(self.row_layers, self.layers, strict=True)
        )

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of the grids' columns: the position and text of the first pair."""
        first = self.pairs[0]
        return tuple(f"{label(span)} {text}" for span, text in zip(first.columns, first.labels, strict=True))

    @property
    def digest(self) -> str:
        """Digest of the description, without the default metric, which changes no cell."""
        content: dict[str, Any] = {**msgspec.to_builtins(self), "metric": "custom" if self.metric == "custom" else ""}
        return hashlib.blake2b(msgspec.json.encode(content), digest_size=16).hexdigest()
