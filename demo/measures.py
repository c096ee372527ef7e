# SPDX-License-Identifier: Apache-2.0
"""What the demo measures: the log-odds of the next word, the mood of a text, and its perplexity without steering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from demo.texts import Trait
from vllm_steer import SamplingParams
from vllm_steer.lab.scores import perplexity, read_again

Edits = Sequence[Any]
"""The edits of one request."""


def sampling(edits: Edits, max_tokens: int, **fields: Any) -> Any:
    """Return the sampling parameters of the demo's answers: greedy, with a penalty on repeated tokens."""
    steering = list(edits) or None
    return SamplingParams(temperature=0.0, repetition_penalty=1.15, max_tokens=max_tokens, steering=steering, **fields)


def answer(
    llm: Any, questions: Sequence[str], each: Sequence[Edits], max_tokens: int, **fields: Any
) -> list[list[Any]]:
    """Answer all questions with each list of edits, in one batch. Return vLLM's outputs by edits and question."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    params = [sampling(edits, max_tokens, **fields) for edits in each for _ in questions]
    outputs = llm.chat(chats * len(each), params, use_tqdm=False)
    return [outputs[start : start + len(chats)] for start in range(0, len(outputs), len(chats))]


def perplexities(llm: Any, groups: Sequence[Sequence[Any]]) -> list[float]:
    """Return the perplexity of the generated tokens of each group of outputs under the model without steering."""
    readings = iter(read_again(llm, [output for group in groups for output in group]))
    return [perplexity([next(readings) for _ in group]) for group in groups]


def log_odds(llm: Any, trait: Trait, each: Sequence[Edits], starts: Sequence[str] = ()) -> np.ndarray:
    """Return log P(a plus word) - log P(a minus word) for the word after each start.

    Args:
        llm: An engine with steering.
        trait: The trait whose words count. Each is one token.
        each: Lists of edits.
        starts: Beginnings of sentences, by default the trait's own.

    Returns:
        float ``[edits, starts]``.
    """
    starts = starts or trait.starts
    tokenizer = llm.get_tokenizer()
    words = (*trait.plus_words, *trait.minus_words)
    ids = [token for word in words for (token,) in [tokenizer.encode(f" {word}", add_special_tokens=False)]]
    params = [
        SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=ids, steering=list(edits) or None)
        for edits in each
        for _ in starts
    ]
    outputs = llm.generate(list(starts) * len(each), params, use_tqdm=False)
    logprobs = np.array([[output.outputs[0].logprobs[0][token].logprob for token in ids] for output in outputs])
    plus, minus = np.split(logprobs, [len(trait.plus_words)], axis=1)
    odds = np.logaddexp.reduce(plus, axis=1) - np.logaddexp.reduce(minus, axis=1)
    return odds.reshape(len(each), len(starts))
