# SPDX-License-Identifier: Apache-2.0
"""A model that can be computed by hand: the logits are the sum of the last layer's rows over all positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm_steer.patching.runner import ModelFacts, Score, ScoreRequest

WORDS = ("the", " red", " blue", " car", " bus", " is", " fast", " slow")
LAYERS = 2
WEIGHTS = (1.0, 0.5)
"""Weight with which the rows of a position enter the logits if the position is in the first half, or the second."""


class FakeRunner:
    """Rows are one-hot by token, equal at all layers; patching a position replaces the token's part of the logits."""

    def __init__(self) -> None:
        self.requests: list[ScoreRequest] = []
        self.noise: Any = lambda request: 0.0
        self.fail: Any = lambda request: None
        self.facts = ModelFacts("fake", LAYERS, len(WORDS), ("pre_attn", "post_block"), len(WORDS), len(WORDS))

    def encode(self, text: str, special: bool) -> list[int]:
        return [WORDS.index(word if word == "the" else f" {word}") for word in text.split()]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [WORDS[token] for token in tokens]

    def check(self) -> None:
        pass

    def reserve(self, runs: int, row_bytes: int) -> None:
        self.reserved = runs, row_bytes

    def rows(self, tokens: Sequence[int], edits: Sequence[Any]) -> np.ndarray:
        rows = np.eye(len(WORDS), dtype=np.float32)[list(tokens)]
        for edit in edits:
            positions = [p for start, stop in edit.tokens.intervals(len(tokens)) for p in range(start, stop)]
            away = edit.vector - rows[positions]
            if edit.subspace is not None:
                basis = np.linalg.qr(edit.subspace.astype(np.float64).T)[0]
                away = (away @ basis @ basis.T).astype(np.float32)
            rows[positions] += edit.strength * away
        return rows

    def capture(self, tokens: Sequence[int], sites: Mapping[str, Sequence[int]], edits: Sequence[Any] = ()) -> Any:
        return {(point, layer): self.rows(tokens, edits) for point, layers in sites.items() for layer in layers}

    def logprobs(self, tokens: Sequence[int], edits: Sequence[Any]) -> dict[int, float]:
        logits = (self.rows(tokens, edits) * np.linspace(0.5, 2.0, len(tokens))[:, None]).sum(axis=0)
        logits = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
        return dict(enumerate(logits.tolist()))

    def top(self, tokens: Sequence[int], count: int) -> dict[int, float]:
        ranked = sorted(self.logprobs(tokens, ()).items(), key=lambda item: -item[1])
        return dict(ranked[:count])

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        self.requests += requests
        return [self._one(request) for request in requests]

    def _one(self, request: ScoreRequest) -> Score:
        if (error := self.fail(request)) is not None:
            return Score(error=error, prompt_tokens=len(request.tokens))
        known = self.logprobs(request.tokens, request.edits)
        noise = self.noise(request)
        scored = {token: known[token] + noise * token for token in (*request.wanted, *request.reference)}
        return Score(scored, None, 1, len(request.tokens))
