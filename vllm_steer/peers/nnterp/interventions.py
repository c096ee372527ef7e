# SPDX-License-Identifier: Apache-2.0
"""Logit lens and patchscopes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_steer.errors import SteeringError
from vllm_steer.peers.nnterp.model import StandardizedTransformer, read_prompts


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
