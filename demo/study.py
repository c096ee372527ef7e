# SPDX-License-Identifier: Apache-2.0
"""A steering vector from pairs of sentences, and the choice of its layer and dose.

A *dose* is the length of the added vector divided by the median length of the stream at the layer, so that one number
means the same in each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from demo.texts import CHOICE, HAPPY_AND_SAD, mood
from vllm_steer import Edit, SamplingParams, capture_hidden_states

MAX_TOKENS = 36
LAYERS = (6, 8, 10)
DOSES = (-0.35, -0.25, -0.15, 0.15, 0.25, 0.35)
MAX_PERPLEXITY = 1.6
"""Largest perplexity of steered text under the model without steering, as a multiple of that of plain text."""
RANDOM_DIRECTIONS = 20


@dataclass(frozen=True)
class Direction:
    """A unit vector at ``post_block`` of a layer, and the median length of the stream there."""

    layer: int
    unit: np.ndarray
    stream: float
    middle: float
    """Mean of the stream's component along the vector over the texts of the pairs."""

    def edit(self, dose: float, **fields: Any) -> Any:
        """Return the edit that adds a dose of the direction."""
        return Edit("add", point="post_block", layers=self.layer, vector=self.unit * self.stream, strength=dose, **fields)


@dataclass(frozen=True)
class Cell:
    """Answers to the questions of one direction and dose, their mood, and their perplexity without steering."""

    direction: Direction | None
    dose: float
    texts: tuple[str, ...]
    mood: float
    perplexity: float


def directions(llm: Any) -> dict[int, Direction]:
    """Return the direction from sad to happy of each layer: the difference of the means over the pairs.

    The first token is left out: its stream does not depend on the text and is a hundred times longer than the others'.
    """
    texts = [text for pair in HAPPY_AND_SAD for text in pair]
    states = capture_hidden_states(llm, texts, hooks={"post_block": "all"}, positions=[[1, None]], dtype="float32")
    found = {}
    for point, layer in states.sites:
        rows, owner = states.tensor(point, layer).numpy(), states.prompt_index(point, layer).numpy()
        means = np.stack([rows[owner == index].mean(0) for index in range(len(texts))])
        difference = means[0::2].mean(0) - means[1::2].mean(0)
        stream = float(np.median(np.linalg.norm(rows, axis=1)))
        unit = difference / np.linalg.norm(difference)
        found[layer] = Direction(layer, unit, stream, float((rows @ unit).mean()))
    return found


def sampling(edits: Sequence[Any], **fields: Any) -> Any:
    """Return the sampling parameters of all answers of the demo."""
    chosen = {"temperature": 0.0, "repetition_penalty": 1.15, "max_tokens": MAX_TOKENS}
    return SamplingParams(**chosen, steering=list(edits) or None, **fields)


def answers(llm: Any, questions: Sequence[str], edits: Sequence[Any], **fields: Any) -> list[Any]:
    """Return vLLM's outputs for questions with one list of edits."""
    params = sampling(edits, **fields)
    chats = [[{"role": "user", "content": question}] for question in questions]
    return [output.outputs[0] for output in llm.chat(chats, params, use_tqdm=False)]


def run_cells(llm: Any, plan: Sequence[tuple[Direction | None, float]]) -> list[Cell]:
    """Answer :data:`demo.texts.CHOICE` with each direction and dose, in one batch of requests.

    The perplexities take a second batch: the model without steering reads the answers.
    """
    params = [
        sampling([direction.edit(dose)] if direction else [])
        for direction, dose in plan
        for _ in CHOICE
    ]
    chats = [[{"role": "user", "content": question}] for question in CHOICE]
    outputs = llm.chat(chats * len(plan), params, use_tqdm=False)
    losses = plain_losses(llm, outputs)
    cells = []
    for index, (direction, dose) in enumerate(plan):
        part = slice(index * len(CHOICE), (index + 1) * len(CHOICE))
        texts = tuple(output.outputs[0].text for output in outputs[part])
        cells.append(Cell(direction, dose, texts, float(np.mean([mood(text) for text in texts])), perplexity(losses[part])))
    return cells


def plain_losses(llm: Any, outputs: Sequence[Any]) -> list[np.ndarray]:
    """Return the negative log-probability of each generated token under the model without steering."""
    prompts = [{"prompt_token_ids": [*each.prompt_token_ids, *each.outputs[0].token_ids]} for each in outputs]
    read = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    return [
        np.array([-by_token[token].logprob for token, by_token in zip(ids, each.prompt_logprobs, strict=True) if by_token])[
            len(output.prompt_token_ids) - 1 :
        ]
        for each, output in zip(read, outputs, strict=True)
        for ids in [each.prompt_token_ids]
    ]


def perplexity(losses: Sequence[np.ndarray]) -> float:
    """Return the perplexity of texts: the exponential of the mean loss of their tokens."""
    return float(np.exp(np.concatenate(losses).mean()))


def choose(cells: Sequence[Cell], sign: int) -> Cell:
    """Return the cell that moves the mood furthest in one direction among those with coherent text."""
    plain = next(cell for cell in cells if cell.direction is None)
    coherent = [c for c in cells if c.dose * sign > 0 and c.perplexity <= MAX_PERPLEXITY * plain.perplexity]
    if not coherent:
        raise RuntimeError(f"No dose of sign {sign:+} has a perplexity below {MAX_PERPLEXITY} times that of plain text.")
    return max(coherent, key=lambda cell: sign * cell.mood)


def random_directions(direction: Direction) -> list[Direction]:
    """Return directions of the same layer and length that know nothing of moods."""
    drawn = np.random.default_rng(0).standard_normal((RANDOM_DIRECTIONS, len(direction.unit)))
    units = (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)
    return [replace(direction, unit=unit) for unit in units]
