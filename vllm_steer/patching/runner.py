# SPDX-License-Identifier: Apache-2.0
"""What a study needs of an engine: tokens, captured rows and log-probabilities of the next token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_steer.points import PointName
from vllm_steer.request import Edit

Rows: TypeAlias = npt.NDArray[np.float32]
"""float32 ``[tokens, hidden]``."""
SiteRows: TypeAlias = Mapping[tuple[str, int], Rows]
"""Rows by point and layer."""


MAX_SCORED = 128
"""Most tokens that one request can name for scoring, as in vLLM's sampler."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model and the engine."""

    model: str
    num_layers: int
    hidden_size: int
    points: tuple[PointName, ...]
    """Points that the engine can read and edit, in order of computation."""
    max_reference: int
    """Most tokens of the clean distribution that one request can score, for the KL divergence."""
    vocab_size: int
    max_model_len: int | None = None
    """Most tokens of a prompt, the answer and one more token; None if unknown."""
    reference_limit: str = f"with this engine; start it with max_logprobs={MAX_SCORED}"
    """End of the error for more tokens than ``max_reference``."""


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """A forward pass of a prompt, of which only the distribution after the last token is used."""

    tokens: tuple[int, ...]
    edits: tuple[Edit, ...] = ()
    wanted: tuple[int, ...] = ()
    """Tokens whose log-probabilities are required."""
    reference: tuple[int, ...] = ()
    """Tokens whose log-probabilities are of use; the engine may return other frequent ones instead."""

    @property
    def scored(self) -> list[int]:
        """Tokens whose log-probabilities are asked for, at most `MAX_SCORED`."""
        return list(dict.fromkeys((*self.wanted, *self.reference)))[:MAX_SCORED]

    def score(self, logprobs: Mapping[int, float], cached_tokens: int, source: str) -> Score:
        """Return the score with the log-probabilities of an answer, or with the error that one is missing."""
        missing = [token for token in self.wanted if token not in logprobs]
        if missing:
            return self.failed(f"the {source} returned no log-probability of token {missing[0]}")
        return Score(logprobs, None, cached_tokens, len(self.tokens))

    def failed(self, error: object) -> Score:
        """Return the score of a request that failed."""
        return Score(error=str(error) or type(error).__name__, prompt_tokens=len(self.tokens))


@dataclass(frozen=True, eq=False)
class Score:
    """Answer to a `ScoreRequest`."""

    logprobs: Mapping[int, float] = field(default_factory=dict)
    """Log-probabilities of the next token, in nats, before any temperature."""
    error: str | None = None
    """Why there are no log-probabilities."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    prompt_tokens: int = 0


CONTINUED = "\ufffd"
"""Text of a token that continues a character of the token before."""
_MAX_PARTS = 8
"""Most tokens that are joined to complete characters."""


def join_characters(tokens: Sequence[int], pieces: Sequence[str], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return the texts of tokens, in which characters that several tokens make up are whole.

    The first of such tokens has the text of all of them, the others have ``CONTINUED``.

    Args:
        tokens: The tokens of a prompt.
        pieces: The text of each token on its own.
        decode: Returns the text of several tokens.
    """
    joined, start = list(pieces), 0
    while start < len(tokens):
        stop = start + 1
        if CONTINUED in pieces[start]:
            for end in range(start + 2, min(start + _MAX_PARTS, len(tokens)) + 1):
                text = decode(tokens[start:end])
                if CONTINUED not in text:
                    joined[start:end] = [text, *[CONTINUED] * (end - start - 1)]
                    stop = end
                    break
        start = stop
    return joined


class Runner(Protocol):
    """An engine that runs the requests of a study. Subclasses accept studies of any size, which nothing cancels."""

    @property
    def facts(self) -> ModelFacts:
        """Facts about the model and the engine."""
        ...

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the tokens of a text, with the tokenizer's special tokens if ``special`` is set."""
        ...

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token, with `join_characters`."""
        ...

    def check(self) -> None:
        """Raise if the study was cancelled; called in every loop over its cells."""
        return

    def reserve(self, runs: int, row_bytes: int) -> None:
        """Raise ``SteeringError`` if the sweep is too large; called before its first run.

        Args:
            runs: Forward passes of all cells.
            row_bytes: Size of the captured rows that the sweep keeps, as float32.
        """
        return

    @staticmethod
    def spec_of_rows(sites: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Return the field ``capture`` for the rows of all tokens of a prompt."""
        hooks = {point: list(layers) for point, layers in sites.items()}
        return {"memory": {"hooks": hooks, "positions": "all_prompt", "dtype": "float32"}}

    def capture(
        self, tokens: Sequence[int], sites: Mapping[str, Sequence[int]], edits: Sequence[Edit] = ()
    ) -> SiteRows:
        """Return the rows of all tokens of a prompt at layers by point; raise ``RuntimeError`` if one is missing."""
        ...

    def top(self, tokens: Sequence[int], count: int) -> dict[int, float]:
        """Return the log-probabilities of the ``count`` most probable next tokens."""
        ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Run requests together and return their scores in order. A request that fails does not fail the others."""
        ...
