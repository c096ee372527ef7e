# SPDX-License-Identifier: Apache-2.0
"""Zeroing of KV-cache blocks that edited requests have used, before another request gets them (CPU only).

An edit can overflow the dtype of the residual stream, after which the keys and values of its request are not finite.
They stay in the request's blocks when these are freed. vLLM's CPU attention (``v1/attention/backends/cpu_attn.py``)
reads blocks 32 tokens at a time and gives tokens after the end of a sequence the weight zero; zero times infinity is
NaN, which would reach the next request. Stock vLLM zeroes blocks only for some kinds of caches
(``KVCacheConfig.needs_kv_cache_zeroing``), because its keys and values are always finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_steer.program import Resolved


class EditedBlocks:
    """Ids of the blocks that edited requests have or had and that have not been zeroed since."""

    def __init__(self, managers: Iterable[Any]) -> None:
        self._ids: set[int] = set()
        for manager in managers:
            manager._record_new_block_ids = True

    def record(self, scheduled: Any, with_program: Mapping[str, Resolved]) -> None:
        """Record the blocks that a scheduled step has given to edited requests."""
        new_blocks = [(new.req_id, new.block_ids) for new in scheduled.scheduled_new_reqs]
        cached = scheduled.scheduled_cached_reqs
        # Most running requests need no new block for their next token.
        new_blocks += [each for each in zip(cached.req_ids, cached.new_block_ids, strict=True) if each[1]]
        for request_id, groups in new_blocks:
            resolved = with_program.get(request_id)
            if resolved is not None and resolved.has_edits:
                self._ids.update(*groups)

    def take_reused(self, new: Iterable[int]) -> list[int] | None:
        """Return which of the ``new`` blocks of this step have to be zeroed, or None, and forget them."""
        reused = [block for block in new if block in self._ids]
        self._ids.difference_update(reused)
        return reused or None
