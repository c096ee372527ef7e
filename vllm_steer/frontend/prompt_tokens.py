# SPDX-License-Identifier: Apache-2.0
"""Tokens of a prompt in which embeddings may take the place of some or all tokens.

vLLM's chat routes accept ``prompt_embeds`` as parts of a message, and ``LLM`` accepts an ``EmbedsPrompt`` with token
ids. Such a prompt has a placeholder token at each embedding, and a mask of the positions whose token is real. If the
message also has images, vLLM treats the embeddings as another modality and does not pass a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_steer.capture.results import NO_TOKEN
from vllm_steer.errors import SteeringError

_FIELD = "prompt_is_token_ids"
_MODALITY = "prompt_embeds"


def check_mask(request: Any) -> None:
    """Raise :class:`SteeringError` unless it is known which positions of an engine request have tokens.

    Without a mask, one of vLLM's runners reads the tokens of such a prompt and the other its embeddings.
    """
    tokens, mask = request.prompt_token_ids, request.prompt_is_token_ids
    mixed = tokens is not None and request.prompt_embeds is not None
    if mixed and mask is None:
        raise SteeringError(
            _FIELD,
            "is missing in a prompt of token ids and embeddings; give True for each token, False for each embedding",
        )
    if mask is None:
        return
    if not mixed:
        raise SteeringError(_FIELD, "needs both prompt_token_ids and prompt_embeds; leave it out, or give both")
    if len(mask) != len(tokens):
        raise SteeringError(_FIELD, f"has {len(mask)} values for {len(tokens)} tokens; give one for each token")


def token_mask(request: Any) -> Sequence[bool] | None:
    """Return whether each position of an engine request's prompt has a token, or None if all of them are alike."""
    places = [each.mm_position for each in request.mm_features or () if each.modality == _MODALITY]
    if not places or request.prompt_token_ids is None:
        mask: Sequence[bool] | None = request.prompt_is_token_ids
        return mask
    is_token = [True] * len(request.prompt_token_ids)
    for place in places:
        for first, last in place.extract_embeds_range():
            is_token[first : last + 1] = [False] * (last + 1 - first)
    return is_token


def without_placeholders(tokens: Sequence[int], mask: Sequence[bool] | None) -> Sequence[int]:
    """Return the tokens of a prompt, with -1 at each position that has an embedding instead of a token."""
    if mask is None:
        return tokens
    return [token if is_token else NO_TOKEN for token, is_token in zip(tokens, mask, strict=True)]
