# SPDX-License-Identifier: Apache-2.0
"""Blocks of the KV cache that edited requests have had are zeroed before another request gets them, on a CPU.

An edit may take a stream beyond what its dtype holds. What its request computes from then on is no number, and that is
its own affair; but its keys and values are none either, and stay in their blocks when these are given back. vLLM's
attention on a CPU (``v1/attention/backends/cpu_attn.py``) goes through a block 32 tokens at a time and gives those
behind a sequence's end the weight zero. Zero times infinity is not a number, and nor would be the answers of whoever
has the block next. vLLM itself zeroes blocks for some kinds of caches alone (``KVCacheConfig.needs_kv_cache_zeroing``):
without edits all keys and values are finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_steer.program import Resolved


class EditedBlocks:
    """What one scheduler knows of them: ids of blocks that an edited request has or had, until they are zeroed."""

    def __init__(self, managers: Iterable[Any]) -> None:
        self._ids: set[int] = set()
        for manager in managers:
            manager._record_new_block_ids = True

    def note(self, scheduled: Any, steered: Mapping[str, Resolved]) -> None:
        """After a step has been scheduled: which blocks have gone to requests with edits."""
        given = [(new.req_id, new.block_ids) for new in scheduled.scheduled_new_reqs]
        cached = scheduled.scheduled_cached_reqs
        given += zip(cached.req_ids, cached.new_block_ids, strict=True)
        for request_id, groups in given:
            resolved = steered.get(request_id)
            if groups and resolved is not None and resolved.has_edits:
                self._ids.update(*groups)

    def to_zero(self, new: Iterable[int]) -> list[int] | None:
        """Of blocks that are given out in this step, those to zero ahead of it; None for none."""
        stale = [block for block in new if block in self._ids]
        self._ids.difference_update(stale)
        return stale or None
