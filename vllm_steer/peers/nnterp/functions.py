# SPDX-License-Identifier: Apache-2.0
"""Functions of a model: rows and probabilities of many prompts, logit lens and patchscopes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_steer.adapters import shown
from vllm_steer.errors import SteeringError
from vllm_steer.peers.engines import read_prompts
from vllm_steer.peers.nnterp.model import StandardizedTransformer


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


get_token_activations = StandardizedTransformer.get_token_activations


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


@dataclass
class TargetPrompt:
    """A prompt and the position whose row is replaced.

    Examples:
        >>> from vllm_steer.peers.nnterp import TargetPrompt
        >>> TargetPrompt("a is ?", -1).index_to_patch
        -1
    """

    prompt: str
    index_to_patch: int
    """Position from the prompt's start, or from its end if negative."""


def repeat_prompt(
    words: Sequence[str] | None = None,
    rel: str = " ",
    sep: str = "\n",
    placeholder: str = "?",
    index_to_patch: int = -1,
) -> TargetPrompt:
    """Return a prompt that repeats each word, and ends with a placeholder.

    Examples:
        >>> from vllm_steer.peers.nnterp import repeat_prompt
        >>> repeat_prompt(["a"], sep=" ").prompt
        'a a ?'
    """
    chosen = ("king", "1135", "hello") if words is None else words
    return TargetPrompt(sep.join([*(f"{word}{rel}{word}" for word in chosen), placeholder]), index_to_patch)


def logit_lens(model: StandardizedTransformer, prompts: Any) -> torch.Tensor:
    """Return the next-token probabilities that the final norm and the head give each layer's output.

    Args:
        model: The model.
        prompts: A text or a list of texts.

    Returns:
        ``[prompts, layers, vocab]`` for the last token of each prompt, on the CPU.
    """
    rows = model.get_token_activations(prompts)
    return model.project_on_vocab(rows.transpose(0, 1)).exp()


def patchscope_lens(
    model: StandardizedTransformer,
    source_prompts: Any = None,
    target_patch_prompts: Any = None,
    layers: Any = None,
    latents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Put the last token's row of each source into a target prompt, layer by layer.

    Args:
        model: The model.
        source_prompts: Texts whose rows are read.
        target_patch_prompts: A :class:`TargetPrompt`, or one per source; :func:`repeat_prompt` by default.
        layers: Layers at which rows are read and replaced; all by default.
        latents: Rows ``[layers, sources, hidden]`` in place of ``source_prompts``.

    Returns:
        Probabilities of the next token ``[sources, layers, vocab]``, on the CPU.

    Raises:
        SteeringError: An argument is invalid.
    """
    chosen = model.read_layers(layers)
    latents = _read_latents(model, source_prompts, latents, chosen)
    count = latents.shape[1]
    targets = target_patch_prompts if target_patch_prompts is not None else repeat_prompt()
    targets = [targets] * count if isinstance(targets, TargetPrompt) else list(targets)
    if len(targets) != count:
        raise SteeringError("target_patch_prompts", f"has {len(targets)} prompts for {count} sources")
    encoded = [_encode(model, target, f"target_patch_prompts[{i}]") for i, target in enumerate(targets)]
    edits = [
        [model.replace(layer, latents[i, source], encoded[source][1])]
        for source in range(count)
        for i, layer in enumerate(chosen)
    ]
    prompts = [encoded[source][0] for source in range(count) for _ in chosen]
    return model.probabilities(prompts, edits).reshape(count, len(chosen), -1)


def patchscope_generate(
    model: StandardizedTransformer,
    prompts: Any,
    target_patch_prompt: TargetPrompt,
    max_length: int = 50,
    layers: Any = None,
) -> dict[int, torch.Tensor]:
    """Generate from a target prompt into which the last token's row of each source is put.

    Args:
        model: The model.
        prompts: Source texts.
        target_patch_prompt: The target.
        max_length: Number of tokens to generate.
        layers: Layers at which rows are read and replaced; all by default.

    Returns:
        By layer, the target's tokens and the generated tokens of each source, ``[sources, tokens]``, on the CPU.
        Shorter answers are padded with the tokenizer's padding or end token, or 0.
    """
    chosen = list(dict.fromkeys(model.read_layers(layers)))
    latents = model.get_token_activations(prompts, chosen)
    tokens, position = _encode(model, target_patch_prompt, "target_patch_prompt")
    params = [
        model.params(edits=[model.replace(layer, row, position)], max_tokens=max_length, detokenize=False)
        for i, layer in enumerate(chosen)
        for row in latents[i]
    ]
    outputs = iter(model.run([tokens] * len(params), params))
    tokenizer = model.tokenizer
    pad = next((each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id) if each is not None), 0)
    found = {}
    for layer in chosen:
        rows = [[*tokens, *next(outputs).outputs[0].token_ids] for _ in range(latents.shape[1])]
        longest = max(map(len, rows))
        found[layer] = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    return found


def _read_latents(
    model: StandardizedTransformer, sources: Any, latents: torch.Tensor | None, layers: list[int]
) -> torch.Tensor:
    if (sources is None) == (latents is None):
        raise SteeringError("latents", "and source_prompts: give one of them")
    if latents is None:
        return model.get_token_activations(read_prompts(sources), layers)
    if latents.ndim != 3 or latents.shape[0] != len(layers) or latents.shape[2] != model.hidden_size:
        raise SteeringError(
            "latents",
            f"has shape {list(latents.shape)}; must be [{len(layers)}, sources, {model.hidden_size}], a row for each "
            "layer in the order of layers",
        )
    return latents


def _encode(model: StandardizedTransformer, target: Any, field: str) -> tuple[list[int], int]:
    if not isinstance(target, TargetPrompt):
        raise SteeringError(field, f"must be a TargetPrompt, not {type(target).__name__}")
    tokens = model.encode(target.prompt)
    index = int(target.index_to_patch)
    if not -len(tokens) <= index < len(tokens):
        raise SteeringError(f"{field}.index_to_patch", f"{index} is not one of the prompt's {len(tokens)} tokens")
    return tokens, index % len(tokens)
