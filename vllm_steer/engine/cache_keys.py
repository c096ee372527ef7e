# SPDX-License-Identifier: Apache-2.0
"""Prefix-cache keys: a KV block computed under an edit never serves a request without it, nor the other way round.

vLLM's own hash chain runs on, untouched, on a shadow list (so its salts, LoRA and multimodal keys keep working); a
block from the first edited position on gets a key made of vLLM's hash and the content of the edits up to that block.
Blocks before it keep vLLM's hash and are shared with everybody; equal content gives equal keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vllm_steer.program import Resolved

Hasher = Callable[[Any], list[Any]]


def kv_spans(resolved: Resolved) -> tuple[tuple[int, bytes | None], ...]:
    """``(start, digest)`` of each stretch of positions whose keys and values are edited alike; None where they are
    not."""
    spans: list[tuple[int, bytes | None]] = []
    for segment in resolved.segments:
        if not spans or spans[-1][1] != segment.kv_digest:
            spans.append((segment.start, segment.kv_digest))
    return tuple(spans)


def rekey(
    block_hashes: Iterable[Any],
    first: int,
    block_size: int,
    spans: tuple[tuple[int, bytes | None], ...],
    hash_fn: Callable[[Any], bytes],
) -> list[Any]:
    """Keys of consecutive blocks, the first of which is block ``first`` of the request.

    A block's key covers every span that starts before the block ends, because its keys and values depend on all earlier
    tokens. Spans' ends are not part of it: only starts before the block's end can have had an effect.
    """
    keys = []
    for number, block_hash in enumerate(block_hashes, first):
        end = (number + 1) * block_size
        before = tuple(span for span in spans if span[0] < end)
        edited = any(digest is not None for _, digest in before)
        keys.append(type(block_hash)(hash_fn(("steer", before, block_hash))) if edited else block_hash)
    return keys


def steering_hasher(upstream: Hasher, resolved: Resolved, block_size: int, hash_fn: Callable[[Any], bytes]) -> Hasher:
    """A request's block hasher that re-keys edited blocks; to be installed with an empty ``request.block_hashes``."""
    spans = kv_spans(resolved)
    shadow: list[Any] = []

    def hasher(request: Any) -> list[Any]:
        # The upstream hasher continues the chain from request.block_hashes (v1/core/kv_cache_utils.py,
        # get_request_block_hasher), so it must see its own hashes there, not ours.
        ours, request.block_hashes = request.block_hashes, shadow
        try:
            new = upstream(request)
        finally:
            request.block_hashes = ours
        keys = rekey(new, len(shadow), block_size, spans, hash_fn)
        shadow.extend(new)
        return keys

    return hasher
