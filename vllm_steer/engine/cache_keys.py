# SPDX-License-Identifier: Apache-2.0
"""Prefix-cache keys that include edits, so that edited and unedited requests never share a KV block by mistake.

vLLM's hash chain continues unchanged on a separate list, with its salts, LoRA and multimodal keys. From the first
edited position on, a block's key combines vLLM's hash with the digests of the edits up to that block. Earlier blocks
keep vLLM's hash and are shared by all requests. Equal edits give equal keys.

In models whose image tokens attend to all tokens of their image, later ones included, a block that overlaps an image
also depends on the edits up to the end of the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from vllm_steer.program import Resolved

Hasher: TypeAlias = Callable[[Any], list[Any]]
EditSpans: TypeAlias = tuple[tuple[int, bytes | None], ...]
"""``(start, digest)`` of each span of positions; the digest is None where keys and values are unedited."""
Images: TypeAlias = Sequence[tuple[int, int]]
"""Positions ``[start, stop)`` of images whose tokens attend to each other in both directions, in order."""


def edit_spans(resolved: Resolved, salt: bytes = b"") -> EditSpans:
    """Return the spans of positions whose keys and values are edited alike; ``salt`` is added to edited ones."""
    spans: list[tuple[int, bytes | None]] = []
    for segment in resolved.segments:
        digest = None if segment.kv_digest is None else segment.kv_digest + salt
        if not spans or spans[-1][1] != digest:
            spans.append((segment.start, digest))
    return tuple(spans)


def image_ranges(request: Any) -> Images:
    """Return the positions of each image and video of a request, in order.

    The tokens that mark an image count as parts of it, and so do images larger than the attention window. vLLM's
    runners and models differ about these (``compute_mm_prefix_ranges``); longer ranges cost hits only.
    """
    places = [feature.mm_position for feature in request.mm_features if feature.modality != "audio"]
    return sorted((place.offset, place.offset + place.length) for place in places)


def rekey(
    block_hashes: Iterable[Any],
    first: int,
    block_size: int,
    spans: EditSpans,
    hash_fn: Callable[[Any], bytes],
    images: Images = (),
) -> list[Any]:
    """Return the keys of consecutive blocks.

    A key includes every span that starts before the end of its block, because keys and values depend on all earlier
    tokens, or before the end of an image that the block overlaps.

    Args:
        block_hashes: vLLM's hashes of the blocks.
        first: Index of the first block within the request.
        block_size: Tokens per block.
        spans: Spans of the request.
        hash_fn: vLLM's hash function.
        images: Images under bidirectional attention.
    """
    keys = []
    for number, block_hash in enumerate(block_hashes, first):
        end = (number + 1) * block_size
        if images:
            end = _end_with_images(end, images)
        before = tuple(span for span in spans if span[0] < end)
        edited = any(digest is not None for _, digest in before)
        keys.append(type(block_hash)(hash_fn(("steer", before, block_hash))) if edited else block_hash)
    return keys


def _end_with_images(end: int, images: Images) -> int:
    """Return the end of the tokens that the tokens before ``end`` attend to."""
    for start, stop in images:
        if start < end:
            end = max(end, stop)
    return end


def steering_hasher(
    upstream: Hasher,
    resolved: Resolved,
    block_size: int,
    hash_fn: Callable[[Any], bytes],
    salt: bytes = b"",
    bidirectional: bool = False,
    known: Iterable[Any] = (),
) -> Hasher:
    """Return a block hasher that re-keys edited blocks. Install it with an empty ``request.block_hashes``.

    Requests with different ``salt`` share no edited blocks. ``bidirectional`` is whether the tokens of an image attend
    to later ones. ``known`` are the first hashes of ``upstream`` for the request, which are then not computed again.
    """
    spans = edit_spans(resolved, salt)
    unedited: list[Any] = []
    computed = list(known)

    def hasher(request: Any) -> list[Any]:
        if request.num_tokens < (len(request.block_hashes) + 1) * block_size:
            return []  # hot path, for every token
        # The upstream hasher continues the chain in request.block_hashes (get_request_block_hasher in
        # v1/core/kv_cache_utils.py), so it has to find its own hashes there.
        keys, request.block_hashes = request.block_hashes, unedited
        first = len(unedited)
        if not keys:
            unedited[:], first = computed, 0
            computed.clear()  # when vLLM computes all keys anew later, they may differ
        try:
            unedited.extend(upstream(request))
        finally:
            request.block_hashes = keys
        new = unedited[first:]
        images = image_ranges(request) if bidirectional and new and request.mm_features else ()
        return rekey(new, first, block_size, spans, hash_fn, images)

    return hasher
