# SPDX-License-Identifier: Apache-2.0
"""Functions over many prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_steer.errors import SteeringError
from vllm_steer.peers.nnterp.model import StandardizedTransformer, read_prompts
from vllm_steer.request.scalars import shown


@dataclass
class Prompt:
    """A prompt and the tokens whose probabilities are read.

    Examples:
        >>> from vllm_steer.peers.nnterp import Prompt
        >>> Prompt("2 + 2 =", {"four": [19]}).target_tokens
        {'four': [19]}
    """

    prompt: str
    target_tokens: Mapping[str, Sequence[int]]
    """Token numbers by name; the probabilities of a name's tokens are added."""
    target_strings: Mapping[str, str | Sequence[str]] | None = None
    """Words by name that the tokens were made from."""

    @classmethod
    def from_strings(cls, prompt: str, target_strings: Any, tokenizer: Any) -> Prompt:
        """Return a prompt whose targets are the first tokens of words, each with and without a space ahead of it.

        Args:
            prompt: The prompt.
            target_strings: A word or a list of words by name; without names, their name is ``target``.
            tokenizer: A tokenizer, or a model.

        Raises:
            SteeringError: A word has no tokens of its own.
        """
        named = target_strings if isinstance(target_strings, Mapping) else {"target": target_strings}
        chosen = getattr(tokenizer, "tokenizer", tokenizer)
        return cls(prompt, {name: first_tokens(words, chosen) for name, words in named.items()}, named)


def first_tokens(words: Any, tokenizer: Any) -> list[int]:
    """Return the first token of each word, with and without a space ahead of it.

    Raises:
        SteeringError: The tokenizer gives a word and the word after a space the same first token.
    """
    space = tokenizer.encode(" ", add_special_tokens=False)
    found: list[int] = []
    for word in [words] if isinstance(words, str) else words:
        plain, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}"))
        if not plain or plain[0] == spaced[0]:
            raise SteeringError(
                "target_strings",
                f"{shown(word)} has the same first token with and without a space; give target_tokens instead",
            )
        found += [plain[0], *(spaced[:1] if spaced[:1] != space[:1] else [])]
    return list(dict.fromkeys(found))


def get_token_activations(
    model: StandardizedTransformer,
    prompts: Any,
    layers: Any = None,
    get_activations: str = "layers_output",
    idx: int | None = None,
) -> torch.Tensor:
    """Return ``model.get_token_activations``."""
    return model.get_token_activations(prompts, layers, get_activations, idx)


def collect_token_activations_batched(
    model: StandardizedTransformer,
    prompts: Any,
    batch_size: int,
    layers: Any = None,
    get_activations: str = "layers_output",
    idx: int | None = None,
) -> torch.Tensor:
    """Return ``model.get_token_activations`` of many prompts, of which ``batch_size`` are submitted at once."""
    texts = read_prompts(prompts)
    batches = [texts[i : i + batch_size] for i in range(0, len(texts), batch_size)]
    return torch.cat([model.get_token_activations(batch, layers, get_activations, idx) for batch in batches], dim=1)


def compute_next_token_probs(model: StandardizedTransformer, prompt: Any) -> torch.Tensor:
    """Return ``model.next_token_probs``."""
    probs: torch.Tensor = model.next_token_probs(prompt)
    return probs


def run_prompts(
    model: StandardizedTransformer,
    prompts: Sequence[Prompt],
    batch_size: int = 32,
    get_probs_func: Callable[..., torch.Tensor] | None = None,
    func_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the probability of each target of each prompt.

    Args:
        model: The model.
        prompts: Prompts with the same names of targets.
        batch_size: Prompts per call.
        get_probs_func: Function that returns ``[prompts, layers, vocab]``, such as :func:`logit_lens`; the next token's
            probabilities, with one layer, by default.
        func_kwargs: Arguments of ``get_probs_func``.

    Returns:
        ``[prompts, layers]`` by name.

    Raises:
        SteeringError: Prompts have different targets.
    """
    for i, prompt in enumerate(prompts):
        if set(prompt.target_tokens) != set(prompts[0].target_tokens):
            raise SteeringError(f"prompts[{i}].target_tokens", "has other names than those of prompts[0]")
    found: dict[str, list[torch.Tensor]] = {}
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        texts = [prompt.prompt for prompt in batch]
        if get_probs_func is None:
            probs = model.next_token_probs(texts)[:, None]
        else:
            probs = get_probs_func(model, texts, **(func_kwargs or {}))
        for row, prompt in zip(probs, batch, strict=True):
            for name, tokens in prompt.target_tokens.items():
                found.setdefault(name, []).append(row[:, list(tokens)].sum(dim=1))
    return {name: torch.stack(rows) for name, rows in found.items()}
